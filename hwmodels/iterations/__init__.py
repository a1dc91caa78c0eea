"""Prices one iteration of a replica: layout, memory, operators, pipelines and the roofline over them."""
