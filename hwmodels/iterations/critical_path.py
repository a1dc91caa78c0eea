"""The critical path of an iteration: the total time of its operators, and the bound of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from hwmodels.devices.device import Device
from hwmodels.exact import Num
from hwmodels.iterations.iteration import IterationShape
from hwmodels.iterations.layout import ParallelLayout, RankBatch
from hwmodels.iterations.ops import Operator, Part, Per

LAUNCH_BOUND_SHARE = 0.25
LAUNCH_BOUND_KERNEL_S = 15e-6
"""Thresholds below which an operator is launch-bound.

Each of its kernels takes less than this time, some three kernel starts, and its data-sheet time is less than
this share of it; a longer one is only far below the roof.
"""


class Passing(NamedTuple):
    """A batch, and the number of times that the operators of each part of the model run for it."""

    batch: RankBatch
    times: dict[Part, Any]


def bound_of(op: Operator, device: Device, flops: float, moved: float, call_s: float) -> str:
    """Returns the bound of a call with these figures: compute, memory, launch or communication."""
    if op.is_message:
        return "communication"
    compute_s = flops / device.peak_flops_per_s[op.dtype]
    memory_s = moved / device.memory_bandwidth_bytes_per_s
    is_short = call_s < LAUNCH_BOUND_KERNEL_S * max(op.kernels, 1)
    if is_short and max(compute_s, memory_s) < LAUNCH_BOUND_SHARE * call_s:
        return "launch"
    return "compute" if compute_s >= memory_s else "memory"


def seconds_of(op: Operator, batch: RankBatch) -> Any:
    """Returns seconds of one call; 0 for the LM head and what follows it if no row is sampled."""
    seconds = op.seconds(batch)
    return seconds * np.minimum(batch.rows, 1) if op.per is Per.row else seconds


def total_of(op: Operator, path: Iterable[Passing], quantity: Callable[[RankBatch], Any]) -> Any:
    """Sums a quantity of one call over all calls on the critical path."""
    first, *others = (op.calls * passing.times[op.part] * quantity(passing.batch) for passing in path)
    return sum(others, start=first)


def whole_total(operators: list[Operator], quantity: str, shape: IterationShape) -> Num:
    """Sums a quantity over all calls of the operators, for a batch that one device holds."""
    batch = ParallelLayout().rank_batch(shape)
    total: Num = sum(op.calls * getattr(op, quantity)(batch) for op in operators)
    return total
