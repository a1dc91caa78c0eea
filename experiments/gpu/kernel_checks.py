"""Checks of all kernels at real models' sizes on random inputs; outputs and unused KV start as NaN."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from experiments.gpu.attention_checks import attention_checks
from experiments.gpu.comparison import Check, Random
from experiments.gpu.dense_checks import dense_checks


def checks(device: torch.device, quick: bool) -> Iterator[Check]:
    """Yields the checks one by one; while they run, newly allocated memory is filled with NaN."""
    random = Random(device, quick)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield from attention_checks(random)
        yield from dense_checks(random)
    finally:
        torch.use_deterministic_algorithms(False)
