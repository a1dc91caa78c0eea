"""The claims of the gallery, one module per family; `FAMILIES` has them all."""

from experiments.reproduce.claims import decoding, figures, kernels, memory, speculation

FAMILIES = tuple(module.FAMILY for module in (memory, figures, decoding, kernels, speculation))
