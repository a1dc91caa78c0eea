"""The policies that `windtunnel new` copies; their names stand for the user's: my_policy, MyPolicy."""
