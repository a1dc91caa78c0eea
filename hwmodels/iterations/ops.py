"""An operator of an iteration: its FLOPs, bytes and seconds on one device, and what bounds it.

An operator is evaluated for a `RankBatch` of numbers or arrays. Times that depend only on the number of
tokens or of sampled rows (`Per`) are tabulated (`CountedTimes`); times that depend on contexts are computed
each time, using only the arithmetic of `hwmodels.exact`. `assembly` builds the list of operators.

The operators of a batch determine its operating point on the roofline (`OperatingPoint`):

intensity   model FLOPs / (weights and KV read), FLOP/byte
ridge       peak FLOP/s / bandwidth: batches of a higher intensity could be bound by compute
MFU, MBU    FLOPs / (time peak FLOP/s), bytes / (time bandwidth), over all devices of a replica
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from hwmodels.device import Device
from hwmodels.exact import Lines, highest, larger
from hwmodels.iterations import IterationModel, IterationShape, causal_pairs
from hwmodels.iterations.layout import ParallelLayout, Part, RankBatch, seen
from hwmodels.iterations.memory import MemoryPlan

Quantity = Callable[[RankBatch], Any]
"""FLOPs, bytes or seconds of one call: a number, or an array with one value per iteration."""

LAUNCH_BOUND_SHARE = 0.25
LAUNCH_BOUND_KERNEL_S = 15e-6
"""Thresholds below which an operator is launch-bound.

An operator is launch-bound if each of its kernels takes less than this time (about three kernel starts) and
its data-sheet time is less than this share of it. A longer operator is only far below the roofline.
"""


class Per(Enum):
    """Quantity that an operator's price depends on: a field of `RankBatch`, or a prefix of several."""

    token = "tokens"
    any_token = "all_tokens"
    row = "rows"
    decode = "decode_"
    """Decoding sequences and their contexts; 0 s without decodes. Its seconds are `DecodeSeconds`."""
    prefill = "prefill_"
    """Chunks and their contexts; 0 s without chunks."""
    adapter = "adapter_"
    """Tokens with LoRA adapters and the adapters' ranks; 0 s without adapters."""


def zero(batch: RankBatch) -> float:
    """Returns 0 for every batch."""
    return 0.0


@dataclass(frozen=True, slots=True)
class DecodeSeconds:
    """Seconds of a decode operator: the maximum of several linear functions of contexts, pairs and rows.

    Everything that depends only on the numbers of sequences and rows is computed once: see
    `hwmodels.iterations.decodes`.
    """

    lines: Callable[[int, Any], Lines]
    """Returns the lines for a number of rows per sequence (1 without draft tokens) and a number of sequences.
    For 0 sequences all lines are 0 s; for one row each, no line grows with the rows.
    """
    window: int | None = None
    """Maximum number of tokens of each sequence that are attended to; None: all."""

    def __call__(self, batch: RankBatch) -> Any:
        num_seqs, tokens = batch.decode_seqs, batch.draft_tokens
        keys, pairs = seen(num_seqs, batch.decode_context_tokens, tokens, batch.draft_pairs, self.window)
        each, rows = rows_each(num_seqs, tokens), num_seqs + tokens
        if not isinstance(each, ndarray):
            return highest(self.lines(each, num_seqs), keys, pairs, rows)
        seconds: Any = 0.0
        for count in np.unique(each).tolist():
            own_s = highest(self.lines(int(count), num_seqs), keys, pairs, rows)
            seconds = np.where(each == count, own_s, seconds)
        return seconds


def rows_each(num_seqs: Any, draft_tokens: Any) -> Any:
    """Returns the mean number of rows per sequence, including draft tokens, rounded up."""
    if not isinstance(draft_tokens, ndarray) and not draft_tokens:
        return 1
    each = 1 - -draft_tokens // larger(num_seqs, 1)
    return each if isinstance(each, ndarray) else int(each)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One kernel or one collective, and the number of its calls per iteration."""

    name: str
    component: str
    """Component of the breakdown, one of `hwmodels.iterations.COMPONENTS`."""
    per: Per
    calls: float
    """Calls per iteration, in sequence from the first layer to the last; in a pipeline, per micro-batch."""
    seconds: Quantity
    """Seconds of one call; 0 if the batch has no work for it."""
    flops: Quantity = zero
    stored_bytes: Quantity = zero
    """Bytes of weights and KV read."""
    bytes_moved: Quantity = zero
    """Bytes read and written, including stored_bytes; for a collective, its message size per device."""
    dtype: str = "bf16"
    """Data type of the arithmetic."""
    kernels: int = 1
    """Kernels that the host launches per call."""
    mixed_kernels: int = 0
    """Additional launches per call if prompts and decodes share the iteration."""
    is_message: bool = False
    """True for a collective between devices."""
    part: Part = Part.layers


def per_token(amount: float) -> Quantity:
    """Returns the quantity `amount` per token of the batch."""
    return lambda batch: amount * batch.tokens


def per_row(amount: float) -> Quantity:
    """Returns the quantity `amount` per sampled row of the batch."""
    return lambda batch: amount * batch.rows


def total_seconds(operators: Iterable[Operator], batch: RankBatch) -> Any:
    """Returns the seconds of all calls of the operators for a batch; numbers or arrays."""
    total: Any = 0.0
    for op in operators:
        total = total + op.calls * op.seconds(batch)
    return total


def bound_of(op: Operator, device: Device, flops: float, moved: float, call_s: float) -> str:
    """Returns the bound of a call with these values: compute, memory, launch or communication."""
    if op.is_message:
        return "communication"
    compute_s = flops / device.peak_flops_per_s[op.dtype]
    memory_s = moved / device.memory_bandwidth_bytes_per_s
    is_short = call_s < LAUNCH_BOUND_KERNEL_S * max(op.kernels, 1)
    if is_short and max(compute_s, memory_s) < LAUNCH_BOUND_SHARE * call_s:
        return "launch"
    return "compute" if compute_s >= memory_s else "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatingPoint:
    """Position of one iteration of a replica on the roofline."""

    phase: str
    """Phase of the iteration: decode or prefill."""
    num_seqs: int
    num_tokens: int
    """Computed tokens: one per decode, all tokens of each prompt."""
    seconds: float
    flops: float
    bytes_moved: float
    mfu: float
    mbu: float
    bound: str
    """The bound of most of the time: compute, memory, communication, launch or host."""
    bound_share: float
    """Share of the time that `bound` accounts for."""

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP/byte."""
        return self.flops / self.bytes_moved

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds


class LargestBatch(NamedTuple):
    """The maximum number of sequences that a replica can decode at once."""

    num_seqs: int
    limit: str
    """The limit of the batch: memory or slots."""


def decode_shape(num_seqs: int, context_tokens: int) -> IterationShape:
    """Returns an iteration of num_seqs decodes, each attending to context_tokens, including the new token."""
    return IterationShape(num_seqs, num_seqs * context_tokens, 0, 0, 0, 0, num_seqs)


def prefill_shape(num_seqs: int, prompt_tokens: int) -> IterationShape:
    """Returns an iteration of num_seqs whole prompts, with nothing cached."""
    tokens = num_seqs * prompt_tokens
    return IterationShape(0, 0, num_seqs, tokens, num_seqs * causal_pairs(prompt_tokens), tokens, num_seqs)


def operating_point(model: IterationModel, shape: IterationShape) -> OperatingPoint:
    """Returns the operating point of one decode-only or prefill-only iteration."""
    fields = [float(field) for field in shape.counts]
    seconds, flops = float(model.seconds(shape)), float(model.flops(shape))
    moved = float(model.bytes_moved(shape))
    by_bound: dict[str, float] = defaultdict(float)
    for line in model.explain(shape):
        by_bound[line.bound] += line.share
    bound = max(by_bound, key=lambda name: by_bound[name])
    return OperatingPoint(
        phase="decode" if fields[0] else "prefill",
        num_seqs=int(fields[0] + fields[2]),
        num_tokens=int(fields[0] + fields[3]),
        seconds=seconds,
        flops=flops,
        bytes_moved=moved,
        mfu=flops / (seconds * model.peak_flops_per_s),
        mbu=moved / (seconds * model.peak_bytes_per_s),
        bound=bound,
        bound_share=by_bound[bound],
    )


def ridge_points(device: Device) -> dict[str, float]:
    """Returns peak FLOP/s over bandwidth by dtype; H100 SXM, bf16: 989.4e12 / 3.35e12 = 295."""
    bandwidth = device.memory_bandwidth_bytes_per_s
    return {dtype: peak / bandwidth for dtype, peak in device.peak_flops_per_s.items()}


def largest_batch(plan: MemoryPlan, context_tokens: int, max_num_seqs: int) -> LargestBatch:
    """Returns how many contexts with states fit in the KV blocks, in whole blocks; at most max_num_seqs.

    2,602 blocks of 16 tokens hold 40 contexts of 1,025 tokens, 65 blocks each.
    """
    in_memory = plan.num_blocks // (plan.state_blocks - (-context_tokens // plan.block_size))
    if in_memory < max_num_seqs:
        return LargestBatch(in_memory, "memory")
    return LargestBatch(max_num_seqs, "slots")


Counts = NDArray[np.float64]
Seconds = NDArray[np.float64]

PIECE = 256


class ByCount:
    """Table of formula(n) for n = 0, 1, ...: a lookup takes 60 ns, a computation up to milliseconds.

    Values are always computed in the same pieces of 256 counts, so numbers and arrays are bit-identical.
    """

    def __init__(self, formula: Callable[[Counts], Seconds]) -> None:
        self._formula = formula
        self._array = np.empty(0)
        self._list: list[float | None] = []

    def of(self, counts: Any) -> Any:
        """Returns the value at a count, or those at an array of counts."""
        if type(counts) is np.ndarray:
            return self._of_many(counts)
        try:
            known = self._list[counts]
        except IndexError:
            known = None
        return self._computed(counts) if known is None else known

    def _of_many(self, counts: NDArray[np.intp]) -> Seconds:
        try:
            values = self._array.take(counts)
        except IndexError:
            self._reach(int(counts.max(initial=0)))
            values = self._array.take(counts)
        if np.isnan(values).any():
            for piece in np.unique(counts[np.isnan(values)] // PIECE).tolist():
                self._fill(piece)
            values = self._array.take(counts)
        return values

    def _computed(self, count: int) -> float:
        self._reach(count)
        self._fill(count // PIECE)
        return float(self._array[count])

    def _reach(self, count: int) -> None:
        if count >= len(self._list):
            size = max(2 * len(self._list), (count // PIECE + 1) * PIECE)
            added = size - len(self._list)
            self._array = np.concatenate([self._array, np.full(added, np.nan)])
            self._list += [None] * added

    def _fill(self, piece: int) -> None:
        start = piece * PIECE
        values = self._formula(np.arange(start, start + PIECE, dtype=np.float64))
        self._array[start : start + PIECE] = values
        self._list[start : start + PIECE] = values.tolist()


class CountedTimes:
    """Sums of the operators of a layout by count; numbers and arrays are bit-identical."""

    def __init__(self, operators: Sequence[Operator], layout: ParallelLayout) -> None:
        self._operators = operators
        shared = layout.stage_size > layout.tensor_parallel_size or layout.micro_batches > 1
        together = [Per.token] if shared else [Per.token, Per.any_token]
        self.tokens_s = ByCount(partial(self._sum, together))
        """Seconds by number of tokens of this device, including the experts if their count is the same."""
        self.any_tokens_s = ByCount(partial(self._sum, [Per.any_token])) if shared else None
        """Seconds of the experts by number of tokens of all devices."""
        self.rows_s = ByCount(partial(self._sum, [Per.row]))
        ends = (Part.first, Part.between, Part.last)
        self._ends_s = [ByCount(partial(self._sum, [Per.token], part=part)) for part in ends]

    def of(self, computed: Any, all_tokens: Any, rows: Any) -> Any:
        """Returns the seconds of one or many batches; computed: tokens of this device with padding."""
        gpu_s = self.tokens_s.of(computed) + self.rows_s.of(rows)
        return gpu_s if self.any_tokens_s is None else gpu_s + self.any_tokens_s.of(all_tokens)

    def ends(self, computed: Any, rows: Any) -> tuple[Any, Any, Any]:
        """Returns seconds of a micro-batch before, in and after the layers, as numbers or arrays."""
        first_s, between_s, last_s = (table.of(computed) for table in self._ends_s)
        return first_s, between_s, last_s + self.rows_s.of(rows)

    def _sum(self, kinds: Iterable[Per], counts: Counts, part: Part | None = None) -> Seconds:
        """Sums seconds of operators of these kinds (and part) by count of tokens or rows.

        A count of 0 takes 0 s.
        """
        some = np.maximum(counts, 1)
        batch = RankBatch(some, some, some, 0, 0, 0, 0, 0, 0)
        total = np.zeros_like(counts)
        for op in self._operators:
            if op.per in kinds and part in (None, op.part):
                total += op.calls * op.seconds(batch)
        return total * np.minimum(counts, 1)
