"""Accumulators of the figures of a run: they take its records part by part and can be merged."""
