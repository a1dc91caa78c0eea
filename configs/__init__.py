"""Hydra groups: a folder a family, a file a choice."""
