"""Iteration models by latency level: formulas, measured tables and recorded runs."""
