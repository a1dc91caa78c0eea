"""Every kernel at real models' sizes, on fresh random inputs; outputs and unused KV are NaN before."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from experiments.gpu.attention_checks import attention_checks
from experiments.gpu.comparison import Check, Random
from experiments.gpu.dense_checks import dense_checks


def checks(device: torch.device, quick: bool) -> Iterator[Check]:
    """The checks one by one; while they run, memory that nobody has written is NaN."""
    random = Random(device, quick)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield from attention_checks(random)
        yield from dense_checks(random)
    finally:
        torch.use_deterministic_algorithms(False)
