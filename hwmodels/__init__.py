"""Hardware models: the time of an iteration, and its cost in bytes, dollars and joules."""
