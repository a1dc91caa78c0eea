"""The claims of the gallery: a YAML file per family with its rows, and a module with their functions."""

from experiments.reproduce.claims import (
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
from experiments.reproduce.rows_file import read_family

MODULES = {
    "memory": memory,
    "figures": figures,
    "batching": batching,
    "decoding": decoding,
    "kernels": kernels,
    "speculation": speculation,
    "caching": caching,
    "phases": phases,
    "scheduling": scheduling,
    "adapters": None,
}
FAMILIES = tuple(read_family(name, functions) for name, functions in MODULES.items())
