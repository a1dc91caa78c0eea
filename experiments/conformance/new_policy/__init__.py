"""`windtunnel new policy FAMILY NAME`: writes a working policy, its config and its test as templates."""
