"""Decides: what a serving engine schedules, batches, caches and routes. No clock, no tensors."""
