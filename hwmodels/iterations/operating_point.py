"""Operating points on the roofline: arithmetic intensity, speed, and utilisation of the hardware.

intensity   model FLOPs / (weights and KV read), FLOP/byte
ridge       peak FLOP/s / bandwidth: batches of a higher intensity could be bound by compute
MFU, MBU    FLOPs / (time peak FLOP/s), bytes / (time bandwidth), over all devices of a replica
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from hwmodels.devices.device import Device
from hwmodels.iterations.iteration import IterationModel, IterationShape, causal_pairs
from hwmodels.iterations.memory import MemoryPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatingPoint:
    """Position of one iteration of a replica on the roofline."""

    phase: str
    """Phase of the iteration: decode or prefill."""
    num_seqs: int
    num_tokens: int
    """Computed tokens: one per decode, all of each prompt."""
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
    """The largest number of sequences that a replica can decode at once."""

    num_seqs: int
    limit: str
    """The limit of the batch: memory or slots."""


def decode_shape(num_seqs: int, context_tokens: int) -> IterationShape:
    """Returns an iteration of num_seqs decodes, each attending to context_tokens, the new token included."""
    return IterationShape(num_seqs, num_seqs * context_tokens, 0, 0, 0, 0, num_seqs)


def prefill_shape(num_seqs: int, prompt_tokens: int) -> IterationShape:
    """Returns an iteration of num_seqs whole prompts, with nothing cached."""
    tokens = num_seqs * prompt_tokens
    return IterationShape(0, 0, num_seqs, tokens, num_seqs * causal_pairs(prompt_tokens), tokens, num_seqs)


def operating_point(model: IterationModel, shape: IterationShape) -> OperatingPoint:
    """Returns the operating point of one iteration that only decodes or only prefills."""
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
    """Returns how many contexts with their states fit the KV blocks, in whole blocks; at most max_num_seqs.

    2,602 blocks of 16 tokens hold 40 contexts of 1,025 tokens, 65 blocks each.
    """
    in_memory = plan.num_blocks // (plan.state_blocks - (-context_tokens // plan.block_size))
    if in_memory < max_num_seqs:
        return LargestBatch(in_memory, "memory")
    return LargestBatch(max_num_seqs, "slots")
