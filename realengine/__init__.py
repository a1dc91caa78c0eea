"""The real engine: runs the simulator's policies on a CPU or a GPU."""
