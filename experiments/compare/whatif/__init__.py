"""`windtunnel whatif`: one change at a time against a baseline, on the same traffic."""
