"""Executes step plans on one device or on several tensor-parallel ranks."""
