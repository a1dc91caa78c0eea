"""Metric definitions, the summary of a run, and what plots of it draw."""
