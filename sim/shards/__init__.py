"""Exact shards: replicas that do not influence each other, simulated separately and merged into one run."""
