"""`windtunnel observe`: loads a server with a workload and records what a client sees."""
