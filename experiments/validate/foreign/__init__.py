"""Runs of other engines: reading what was measured, and simulating the same requests."""
