"""Runs a workload on our own engine, records it, replays it and compares it with the simulator."""
