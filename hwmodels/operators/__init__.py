"""Seconds of one call of an operator, a kind of operator a file."""
