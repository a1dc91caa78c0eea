"""Representative launch of a kernel at a real model's sizes, compiled ahead of time and benchmarked."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Case(NamedTuple):
    """One launch: `make` builds its tensors on a device and returns the call that launches it.

    bytes_moved and flops: lower bounds of what one call reads plus writes, and computes; 0 if not counted.
    """

    name: str
    make: Callable[[torch.device], Callable[[], object]]
    bytes_moved: float = 0.0
    flops: float = 0.0
