"""What `windtunnel new` copies: working policies. Their names stand for the user's: my_policy, MyPolicy."""
