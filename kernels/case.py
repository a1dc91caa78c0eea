"""Representative launch of a kernel at a real model's sizes, compiled ahead of time and benchmarked."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Case(NamedTuple):
    """One launch: `make` builds its tensors on a device and returns the call that launches it.

    bytes_moved, flops: lower bounds of the bytes that a call reads and writes, and of its FLOPs; 0: unknown.
    """

    name: str
    make: Callable[[torch.device], Callable[[], object]]
    bytes_moved: float = 0.0
    flops: float = 0.0
