"""Operators that LoRA adapters add to an iteration: a shrink and an expand for every dense projection.

Chen et al., "Punica", MLSys 2024 (SGMV); Sheng et al., "S-LoRA", MLSys 2024. T tokens go through an adapter,
each with its rank r; R is the sum of the ranks of the different adapters, each of which is read once. For a
matrix w[k, n] that fuses p projections (q, k, v: 3; gate, up: 2), each with an adapter of its own:

    FLOPs   2 (p k + n) sum of r over tokens
    bytes   b ((p k + n) R + (k + 2 n) T + 2 p sum of r over tokens)

The time is that of the engine's kernels: see `hwmodels.operators.lora_kernels`. Each tensor parallel rank has
its share of k or n; with `fully_sharded_loras` also of the ranks of the first product or the outputs of the
second, and the ranks exchange the r wide result between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from hwmodels.assembly.site import Site
from hwmodels.exact import larger, smaller
from hwmodels.iterations import AdapterBatch, IterationShape
from hwmodels.iterations.layout import NO_ADAPTERS, RankBatch
from hwmodels.iterations.ops import Operator, Per, total_seconds
from hwmodels.model.weights import Lora, Matrix, Role
from hwmodels.operators.lora_kernels import (
    PEAK_SHARE,
    LoraWork,
    Projection,
    num_launches,
    projection_seconds,
)

SPLIT_BY_ROWS = ("o_proj", "out_proj", "down_proj")
"""Ends of the names of matrices that tensor parallel ranks split over their inputs."""


def adapter_operators(site: Site) -> Iterator[Operator]:
    """Yields one operator per shape of dense matrices; they take 0 s if no token goes through an adapter.

    With kernels that also run without adapters (`cudagraph_specialize_lora` false), the time of those.
    """
    calls: Counter[tuple[Projection, bool]] = Counter()
    for matrix in site.model.layer_matrices(site.ranks):
        if matrix.role is Role.dense:
            calls[_projection(site, matrix)] += matrix.count
    for (projection, by_rows), count in calls.items():
        yield _operator(site, projection, count)
        if site.kernels.lora.fully_sharded_loras and site.tp > 1:
            yield _exchange(site, projection, by_rows, count)


class AddedByAdapters:
    """The adapter operators of a site, built when the first batch with an adapter is priced.

    launch_s: CPU seconds to launch one of the other kernels.
    lora: adapters that are the same in every batch; None: requests name theirs, or there are none.
    """

    def __init__(self, site: Site, launch_s: float = 0.0, lora: Lora | None = None) -> None:
        self._site = site
        self._launch_s = launch_s
        self._lora = lora
        kernels = site.kernels.lora
        self.captured = kernels.is_captured
        self.in_every_batch = lora is not None or _runs_idle(site)
        """Whether batches that name no adapter run adapter kernels, too."""

    @cached_property
    def operators(self) -> list[Operator]:
        return list(adapter_operators(self._site))

    @cached_property
    def _launches(self) -> float:
        """Launches of an iteration, in launches of other kernels that take the host as long."""
        if self._launch_s == 0:
            return 0.0
        kernels = self._site.kernels.lora
        each = kernels.seconds_per_launch / self._launch_s
        return sum(
            op.calls * (op.kernels if op.is_message else each * (op.kernels - kernels.family.fills))
            for op in self.operators
        )

    def of(self, shape: IterationShape) -> IterationShape:
        """Returns the shape with the adapters that every batch has, if there are such."""
        if not self.in_every_batch or shape.adapters is not None:
            return shape
        lora = self._lora
        if lora is None:
            return shape._replace(adapters=NO_ADAPTERS)
        tokens = shape.decode_seqs + shape.prefill_tokens
        if shape.drafts is not None:
            tokens = tokens + shape.drafts.tokens
        active = smaller(tokens, lora.num_active)
        return shape._replace(adapters=AdapterBatch(active, tokens, lora.rank * tokens, lora.rank * active))

    def seconds(self, batch: RankBatch) -> tuple[Any, Any]:
        """Returns GPU seconds, and launches in those of other kernels that take the host as long."""
        gpu_s = total_seconds(self.operators, batch)
        if _runs_idle(self._site):
            return gpu_s, self._launches
        return gpu_s, self._launches * smaller(batch.adapter_ranks, 1)


def _runs_idle(site: Site) -> bool:
    """Returns whether the kernels also run for batches without adapters."""
    kernels = site.kernels.lora
    return kernels.max_loras is not None and not kernels.cudagraph_specialize_lora


def _projection(site: Site, matrix: Matrix) -> tuple[Projection, bool]:
    """Returns the projection of a matrix on one rank, and whether ranks split it over its inputs."""
    by_rows = matrix.name.endswith(SPLIT_BY_ROWS)
    slices = matrix.slices or (matrix.n,)
    if site.tp == 1 or not site.kernels.lora.fully_sharded_loras:
        return Projection(matrix.k, slices), by_rows
    if by_rows:
        return Projection(matrix.k, tuple(-(-n // site.tp) for n in slices)), by_rows
    return Projection(matrix.k, slices, shrink_share=1 / site.tp), by_rows


def _operator(site: Site, projection: Projection, calls: float) -> Operator:
    b, device, curve = site.model.element_bytes, site.device, site.calibration.stream
    kernels = site.kernels.lora
    k, n, parts = projection.k, projection.n, len(projection.slices) * projection.shrink_share
    peak = device.peak_flops_per_s[site.dtype] * PEAK_SHARE
    idles = _runs_idle(site)

    def flops(batch: RankBatch) -> Any:
        return 2 * (parts * k + n) * batch.adapter_rank_tokens

    def read(batch: RankBatch) -> Any:
        return (parts * k + n) * b * batch.adapter_ranks

    def moved(batch: RankBatch) -> Any:
        activations = (k + 2 * n) * b * batch.adapter_tokens
        return read(batch) + activations + 2 * parts * b * batch.adapter_rank_tokens

    def seconds(batch: RankBatch) -> Any:
        work = LoraWork(
            batch_tokens=batch.tokens,
            prefill_tokens=batch.prefill_tokens,
            seqs=batch.decode_seqs + batch.prefill_seqs,
            tokens=batch.adapter_tokens,
            adapters=batch.adapter_count,
            rank=batch.adapter_ranks / larger(batch.adapter_count, 1),
        )
        time = larger(flops(batch) / peak, projection_seconds(work, projection, kernels, device, curve, b))
        return time if idles else time * smaller(batch.adapter_ranks, 1)

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
        kernels=sum(num_launches(projection, kernels.family)),
    )


def _exchange(site: Site, projection: Projection, by_rows: bool, calls: float) -> Operator:
    """Returns the collective of the r wide results of shrink, in fp32, if ranks divide both products."""
    parts = len(projection.slices)
    collective = "all_reduce" if by_rows else "all_gather"
    message = site.message(
        collective,
        f"lora_{collective}",
        calls,
        lambda batch: 4 * parts * batch.adapter_rank_tokens,
        site.tp,
        per=Per.adapter,
    )
    return replace(message, seconds=lambda batch: message.seconds(batch) * smaller(batch.adapter_ranks, 1))
