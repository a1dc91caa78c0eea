"""Measures this machine for our own engine: `windtunnel calibrate device=...`."""
