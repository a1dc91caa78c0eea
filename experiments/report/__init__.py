"""`windtunnel report`: draw a run, or a sweep, from what it has left; nothing is simulated."""
