"""Reads measured runs of other engines and simulates the same requests."""
