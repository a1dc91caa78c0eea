"""Simulates one replica: its clock, its main loop, its load signals."""
