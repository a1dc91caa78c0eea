"""Operators: seconds of one call on one device, one kind of operator per file."""
