"""Readers of the config.json of families of models with other parts than Llama's. One family per file."""
