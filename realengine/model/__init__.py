"""Computes a decoder-only transformer over a paged KV cache on one device."""
