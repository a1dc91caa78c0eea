"""Tests that `windtunnel new` copies beside the policies."""
