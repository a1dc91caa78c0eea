"""Fits the curves of a device to measured operators."""
