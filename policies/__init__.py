"""Policies: the decisions of a serving engine, such as scheduling and batching, without clocks or tensors."""
