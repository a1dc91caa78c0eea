"""Describes the shape of a model: layers, attention, MLPs, number formats and transformations."""
