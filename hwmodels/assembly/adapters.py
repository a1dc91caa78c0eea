"""Operators that LoRA adapters add to an iteration: segmented kernels over a batch that mixes adapters.

Chen et al., "Punica", MLSys 2024 (SGMV); Sheng et al., "S-LoRA", MLSys 2024. Each dense matrix w[k, n] has
two more kernels, shrink x a[k, r] and expand by b[r, n]. T tokens go through an adapter, each with its rank
r; R is the sum of the ranks of the different adapters, each of which is read once:

    FLOPs   2 (k + n) sum of r over tokens
    bytes   b ((k + n) R + (k + 2 n) T + 2 sum of r over tokens)

The distribution of tokens over adapters matters only through R: kernels process a segment's tokens together.
Each tensor parallel rank has its share of k or n. The all-reduce of the intermediate result between the two
kernels is left out, because it is only r wide.
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
    """Yields one operator per shape of dense matrices; it takes 0 s if no token goes through an adapter."""
    calls: Counter[tuple[int, int]] = Counter()
    for matrix in site.model.layer_matrices(site.ranks):
        if matrix.role is Role.dense:
            calls[matrix.k, matrix.n] += matrix.count
    for (k, n), count in calls.items():
        yield _operator(site, k, n, count)


class AddedByAdapters:
    """The adapter operators of a site, built when the first batch with an adapter is priced."""

    def __init__(self, site: Site) -> None:
        self._site = site

    @cached_property
    def operators(self) -> list[Operator]:
        return list(adapter_operators(self._site))

    def seconds(self, batch: RankBatch) -> tuple[Any, Any]:
        """Returns GPU seconds and the number of kernels launched."""
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
