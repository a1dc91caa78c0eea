"""`windtunnel compare`: compares arms on the same traffic, with confidence intervals and a verdict."""
