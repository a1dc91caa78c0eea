"""The real world: the same policies on a CPU or a GPU."""
