"""Speculative decoding with real models: the passes that verify draft tokens, and what drafts them."""
