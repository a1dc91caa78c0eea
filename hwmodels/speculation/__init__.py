"""Speculative decoding: prices and memory of drafts, and an iteration model with them."""
