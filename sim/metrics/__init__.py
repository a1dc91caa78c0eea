"""Metric definitions, the summary of a run, and the data series of its plots."""
