"""Readers of the published layouts of heads and layers that draft, with the names that vLLM reads."""
