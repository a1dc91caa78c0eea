"""Compares real runs with a simulated one: settings, errors, tables, reports."""
