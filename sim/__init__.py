"""The simulated world: clock, replicas, workloads, records and metrics."""
