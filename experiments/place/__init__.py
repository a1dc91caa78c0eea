"""`windtunnel place` and `windtunnel spares`: models on GPUs, and spare replicas."""
