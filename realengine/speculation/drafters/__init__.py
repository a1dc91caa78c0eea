"""Drafters: they draft tokens on the device. One proposer per file."""
