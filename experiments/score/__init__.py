"""`windtunnel score`: simulates every row of a table of measurements."""
