"""`windtunnel compare`: arms on the same traffic, with intervals and a verdict."""
