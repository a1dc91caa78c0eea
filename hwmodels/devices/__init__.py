"""Accelerators, their links, hosts and storage, as data sheets and calibrations describe them."""
