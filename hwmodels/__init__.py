"""Prices: how long an iteration takes, and what it costs in bytes, dollars and joules."""
