"""`windtunnel whatif`: compares single changes with a baseline, on the same traffic."""
