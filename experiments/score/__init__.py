"""`windtunnel score`: simulates every row of a measured table."""
