"""`python -m experiments.train_draft`: trains heads and layers that draft, and measures their acceptance."""
