"""`windtunnel sweep`: every combination of several values of settings, one run each, in warm workers."""
