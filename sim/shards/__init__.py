"""Exact shards: replicas that do not influence each other, simulated apart and merged to one run."""
