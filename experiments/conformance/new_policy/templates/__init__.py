"""Policies that `windtunnel new` copies; my_policy and MyPolicy are replaced by the user's names."""
