"""The claims of the gallery, one module per family; `FAMILIES` has them all."""

from experiments.reproduce.claims import (
    adapters,
    batching,
    caching,
    decoding,
    figures,
    kernels,
    memory,
    phases,
    scheduling,
    speculation,
)

MODULES = (
    memory,
    figures,
    batching,
    decoding,
    kernels,
    speculation,
    caching,
    phases,
    scheduling,
    adapters,
)
FAMILIES = tuple(module.FAMILY for module in MODULES)
