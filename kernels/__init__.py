"""Triton kernels, a family a file: launcher, launch table, kernel, torch reference, representative launches.

They stay together, as each is read beside the others; that makes files of up to 750 lines.
"""
