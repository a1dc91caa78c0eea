"""What LoRA adapters add to an iteration: segmented kernels over a batch that mixes them.

Chen et al., "Punica", MLSys 2024 (SGMV); Sheng et al., "S-LoRA", MLSys 2024. Each dense matrix w[k, n] has
two kernels more, shrink x a[k, r] and expand by b[r, n]. T tokens go through an adapter, each with its rank
r; R is the sum of the ranks of the different adapters, each of which is read once:

    FLOPs   2 (k + n) sum of r over tokens
    bytes   b ((k + n) R + (k + 2 n) T + 2 sum of r over tokens)

Nothing depends on how tokens are spread over adapters but R: the kernels take a segment's tokens together.
Of tensor parallel ranks each has its share of k or n; the message that sums up what is between the two
kernels is left out, it is r wide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from hwmodels.assembly.site import LORA_PEAK_SHARE, Site
from hwmodels.exact import larger, smaller
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.ops import Operator, Per
from hwmodels.model.matrices import Role
from hwmodels.operators.stream import stream_seconds


def adapter_operators(site: Site) -> Iterator[Operator]:
    """One for each size of dense matrices; 0 s where no token goes through an adapter."""
    calls: Counter[tuple[int, int]] = Counter()
    for matrix in site.model.layer_matrices(site.ranks):
        if matrix.role is Role.dense:
            calls[matrix.k, matrix.n] += matrix.count
    for (k, n), count in calls.items():
        yield _operator(site, k, n, count)


class AddedByAdapters:
    """The operators of a site's adapters, made when the first adapter is met."""

    def __init__(self, site: Site) -> None:
        self._site = site

    @cached_property
    def operators(self) -> list[Operator]:
        return list(adapter_operators(self._site))

    def seconds(self, batch: RankBatch) -> tuple[Any, Any]:
        """GPU seconds, and how many kernels they are."""
        gpu_s: Any = 0.0
        for op in self.operators:
            gpu_s = gpu_s + op.calls * op.seconds(batch)
        num_kernels = sum(op.calls * op.kernels for op in self.operators)
        return gpu_s, num_kernels * smaller(batch.adapter_ranks, 1)


def _operator(site: Site, k: int, n: int, calls: float) -> Operator:
    b, device, curve = site.model.element_bytes, site.device, site.calibration.stream
    peak = device.peak_flops_per_s[site.dtype] * LORA_PEAK_SHARE

    def flops(batch: RankBatch) -> Any:
        return 2 * (k + n) * batch.adapter_rank_tokens

    def read(batch: RankBatch) -> Any:
        return (k + n) * b * batch.adapter_ranks

    def moved(batch: RankBatch) -> Any:
        return read(batch) + (k + 2 * n) * b * batch.adapter_tokens + 2 * b * batch.adapter_rank_tokens

    def seconds(batch: RankBatch) -> Any:
        stream_s = stream_seconds(moved(batch), device, curve, kernels=2)
        return larger(flops(batch) / peak, stream_s) * smaller(batch.adapter_ranks, 1)

    return Operator(
        name="lora",
        component="gemm",
        per=Per.adapter,
        calls=calls,
        seconds=seconds,
        flops=flops,
        stored_bytes=read,
        bytes_moved=moved,
        dtype=site.dtype,
        kernels=2,
    )
