"""Operators of layers with a state of constant size (`RecurrentLayer`), of one layer on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hwmodels.assembly.site import Site
from hwmodels.exact import Lines, larger, smaller
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.ops import DecodeSeconds, Operator, Per, Quantity
from hwmodels.model.linear_attention import RecurrentLayer


def linear(site: Site, spec: RecurrentLayer, calls: float) -> Iterator[Operator]:
    """Yields projections, short convolution, the recurrence over the state, gate or gated norm."""
    b = site.model.element_bytes
    *in_projs, out_proj = spec.matrices(site.model.hidden_size, site.tp)
    for matrix in in_projs:
        yield from site.gemm(matrix, calls)
    if width := spec.conv_width(site.tp):
        yield site.stream("convolution", calls, 2 * width * b)
    yield from recurrence(site, spec, calls)
    yield site.stream("output_gate", calls, 3 * spec.value_width(site.tp) * b)
    yield from site.gemm(out_proj, calls)


def recurrence(site: Site, spec: RecurrentLayer, calls: float) -> Iterator[Operator]:
    """Yields the recurrence, which reads and writes a sequence's state once per decode and once per chunk."""
    state_bytes = spec.state_bytes(site.model.dtype, site.tp)
    token_flops, chunk_flops = spec.token_flops(site.tp), spec.chunk_token_flops(site.tp)
    peak = site.device.peak_flops_per_s[site.dtype] * site.calibration.attention.flops_share
    bandwidth = site.device.memory_bandwidth_bytes_per_s * site.calibration.stream.bandwidth_share
    start_s = site.calibration.stream.start_s

    def busy_seconds(tokens_flops: Any, seqs: Any) -> Any:
        busy_s = larger(tokens_flops / peak, 2.0 * state_bytes * seqs / bandwidth)
        return start_s * smaller(seqs, 1) + busy_s

    def lines(rows: int, seqs: Any) -> Lines:
        if rows == 1:
            return ((busy_seconds(token_flops * seqs, seqs), 0.0, 0.0, 0.0),)
        # The state is stored after each row, as any of them may be the last that is accepted.
        started_s = start_s * smaller(seqs, 1)
        read_s, row_s = state_bytes * seqs / bandwidth, state_bytes / bandwidth
        return (started_s, 0.0, 0.0, token_flops / peak), (started_s + read_s, 0.0, 0.0, row_s)

    def rows_of(batch: RankBatch) -> Any:
        return batch.decode_seqs + batch.draft_tokens

    def advanced(per: Per, seconds: Quantity, flops: Quantity, seqs: Quantity, stored: Quantity) -> Operator:
        return Operator(
            name=f"{spec.scan_name}_{per.name}",
            component="attention",
            per=per,
            calls=calls,
            seconds=seconds,
            flops=flops,
            stored_bytes=lambda batch: state_bytes * seqs(batch),
            bytes_moved=lambda batch: state_bytes * (seqs(batch) + stored(batch)),
            dtype=site.dtype,
            kernels=1 if per is Per.decode else 0,
        )

    yield advanced(
        Per.decode,
        DecodeSeconds(lines),
        lambda b: token_flops * rows_of(b),
        lambda b: b.decode_seqs,
        rows_of,
    )
    yield advanced(
        Per.prefill,
        lambda b: busy_seconds(chunk_flops * b.prefill_tokens, b.prefill_seqs),
        lambda b: chunk_flops * b.prefill_tokens,
        lambda b: b.prefill_seqs,
        lambda b: b.prefill_seqs,
    )
