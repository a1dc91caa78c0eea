"""Triton kernels, a family a file, each with its launcher, torch reference and representative launches."""
