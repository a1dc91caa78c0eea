"""Triton kernels, one family per file, each with launcher, torch reference and representative launches."""
