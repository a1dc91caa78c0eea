"""Reads a model's shape from a Hugging Face config.json."""
