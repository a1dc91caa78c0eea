"""Replicas behind a gateway: routing, admission, scaling and failures in simulated time."""
