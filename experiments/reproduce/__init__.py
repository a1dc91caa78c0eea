"""`windtunnel reproduce`: published figures beside ours, one row per claim."""
