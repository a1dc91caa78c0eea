"""`windtunnel score league`: predictions of several simulators for the same measured rows, side by side."""
