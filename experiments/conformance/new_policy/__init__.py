"""`windtunnel new policy FAMILY NAME`: a working policy, its config and its test, to begin with."""
