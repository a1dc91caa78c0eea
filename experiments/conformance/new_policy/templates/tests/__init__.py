"""The tests that `windtunnel new` copies beside the policies."""
