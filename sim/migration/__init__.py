"""Live migration of running requests between replicas."""
