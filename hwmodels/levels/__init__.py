"""Iteration models that answer from measurements instead of formulas."""
