"""Replications of published cluster designs, run as python -m experiments.papers.NAME."""
