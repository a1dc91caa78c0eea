"""Iterations of a replica and the parts of their price: layout, memory, operators, pipelines, energy."""
