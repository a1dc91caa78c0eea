"""Benchmarks of the simulator and the engine, run as python -m experiments.bench.NAME."""
