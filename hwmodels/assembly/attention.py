"""Attention operators of one layer on one rank, projections included, for each kind of attention.

Grouped-query attention and layers with a state of constant size (`RecurrentLayer`) are defined here, kinds of
latent attention in `latent.py`; `OPERATORS` maps kind to function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from hwmodels.assembly.latent import both_phases, compressed, delay_beside_prefill, indexer, latent
from hwmodels.assembly.site import Site
from hwmodels.exact import Lines, larger, smaller
from hwmodels.iterations.layout import RankBatch, decode_keys, decode_pairs, within_window
from hwmodels.iterations.ops import DecodeSeconds, Operator, Per, Quantity, per_token
from hwmodels.model.attention import Attention, CompressedAttention, GroupedQueryAttention, LatentAttention
from hwmodels.model.recurrent import (
    BesideAttention,
    KimiDeltaAttention,
    LightningAttention,
    LinearAttention,
    Mamba1,
    Mamba2,
    RecurrentLayer,
    ShortConvolution,
)
from hwmodels.model.weights import KV_BYTES, KV_SCALE_BYTES, share_of
from hwmodels.operators.attention import DecodeAttention, HeadLayout, PrefillAttention
from hwmodels.operators.systolic import SystolicDecode, SystolicPrefill


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


def attention_operators(site: Site, spec: Attention, calls: float) -> Iterator[Operator]:
    """Yields the operators of `calls` attention layers of the kind of `spec`."""
    return OPERATORS[type(spec)](site, spec, calls)


def grouped_query(site: Site, spec: GroupedQueryAttention, calls: float) -> Iterator[Operator]:
    """Yields the operators of multi-head, grouped-query or multi-query attention."""
    qkv_proj, o_proj, *others = spec.matrices(site.model.hidden_size, site.tp)
    scale_bytes = KV_SCALE_BYTES.get(site.model.kv_dtype, 0.0)
    kv_element_bytes = KV_BYTES[site.model.kv_dtype] + 2 * scale_bytes / (spec.head_dim + spec.value_dim)
    # A query attends to the tokens of a window, or to as many as the indexer selects.
    reach = spec.window if spec.sparse_top_k is None else spec.sparse_top_k
    heads = HeadLayout(
        num_heads=share_of(spec.num_heads, site.tp),
        num_kv_heads=spec.kv_heads_per_rank(site.tp),
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        kv_bytes_per_element=kv_element_bytes,
        windowed=reach is not None,
    )
    b = site.model.element_bytes
    q_width, kv_width = heads.num_heads * spec.head_dim, heads.num_kv_heads * spec.head_dim
    cached_width = kv_width + heads.num_kv_heads * spec.value_dim
    for matrix in (qkv_proj, *others):
        yield from site.gemm(matrix, calls)
    if spec.qk_norm:
        yield from qk_norm(site, spec, (q_width + kv_width) * b, calls)
    yield site.stream("rotary", calls, 2 * (q_width + kv_width) * b)
    if not spec.shares_kv:
        yield site.stream("kv_write", calls, cached_width * (b + heads.kv_bytes_per_element))
    if spec.sparse_top_k is not None:
        key_bytes = spec.index_key_bytes(site.model.kv_dtype)
        yield from indexer(site, spec.index_n_heads, spec.index_head_dim, key_bytes, calls)
    yield from softmax_attention(site, heads, reach, calls)
    if site.layout.context_parallel_size > 1:
        kv_bytes, q_bytes = heads.kv_bytes_per_token, q_width * b
        yield from around_the_ring(site, kv_bytes, q_bytes, calls)
    if spec.output_gate or spec.head_gate:
        yield site.stream("output_gate", calls, 3 * q_width * b)
    yield from site.gemm(o_proj, calls)


def qk_norm(site: Site, spec: GroupedQueryAttention, width_bytes: float, calls: float) -> Iterator[Operator]:
    """Yields the norms of queries and keys; width_bytes: of a token's queries and keys on this rank.

    If a norm is over all heads, each rank sums its squares, in fp32, before any can scale: a kernel reads
    queries and keys, an all-reduce of two numbers per token follows, and a kernel reads and writes them.
    """
    if spec.qk_norm_joins_heads and site.tp > 1:
        yield site.stream("qk_norm_squares", calls, width_bytes)
        yield site.message("all_reduce", "qk_norm_all_reduce", calls, per_token(2 * 4.0), site.tp)
    yield site.stream("qk_norm", calls, 2 * width_bytes)


def softmax_attention(site: Site, heads: HeadLayout, window: int | None, calls: float) -> Iterator[Operator]:
    """Yields decode and prefill attention; one variable-length kernel runs both, each has its own price."""
    curve, dtype = site.calibration.attention, site.dtype
    library = site.kernels.attention_kernels or site.kernels.library
    if site.device.systolic is not None and site.kernels.attention_kernels is not None:
        raise ValueError(
            f"attention_kernels={site.kernels.attention_kernels}: has no price on the systolic arrays of "
            f"{site.device.name}; set engine.kernels.attention_kernels=null, or choose a GPU"
        )
    prefill: PrefillAttention | SystolicPrefill
    if site.device.systolic is None:
        prefill = PrefillAttention(heads, site.device, curve, library, dtype)
    else:
        prefill = SystolicPrefill(heads, site.device, curve, dtype)

    @cache
    def decode(rows: int) -> DecodeAttention | SystolicDecode:
        if site.device.systolic is None:
            return DecodeAttention(heads, site.device, curve, library, rows, dtype)
        return SystolicDecode(heads, site.device, curve, dtype, rows)

    suffix = "" if window is None else f"_window_{window}"

    def prefill_seconds(batch: RankBatch) -> Any:
        cut = batch if window is None else within_window(batch, window)
        return prefill.seconds(
            cut.prefill_seqs, cut.prefill_tokens, cut.prefill_pairs, cut.prefill_context_tokens
        )

    yield from both_phases(
        site,
        suffix,
        calls,
        (DecodeSeconds(lambda rows, seqs: decode(rows).lines(seqs), window), prefill_seconds),
        (
            lambda b: heads.flops_per_pair * decode_pairs(b, window),
            lambda b: heads.flops_per_pair * within_window(b, window).prefill_pairs,
        ),
        (
            lambda b: heads.kv_bytes_per_token * decode_keys(b, window),
            lambda b: heads.kv_bytes_per_token * within_window(b, window).prefill_context_tokens,
        ),
    )
    alone = decode(1)
    if isinstance(alone, DecodeAttention) and alone.beside_prefill > 1:
        yield delay_beside_prefill(site, alone, window, calls)


def around_the_ring(site: Site, kv_bytes: float, q_bytes: float, calls: float) -> Iterator[Operator]:
    """Yields the messages of context parallelism among the devices that share a sequence.

    Prefill: the shards of keys and values pass around the ring (pass-KV), or the shards of queries and their
    partial results if those are smaller (pass-Q). Decode: queries are on every device, and partial results
    are summed.
    """
    ring = site.layout.context_parallel_size

    def prefill_bytes(batch: RankBatch) -> Any:
        pass_kv = kv_bytes * batch.prefill_context_tokens
        pass_q = 2 * q_bytes * ring * batch.prefill_tokens
        return smaller(pass_kv, pass_q) * (ring - 1) / ring

    def decode_bytes(batch: RankBatch) -> Any:
        return q_bytes * (batch.decode_seqs + batch.draft_tokens)

    nodes = site.layout.nodes_spanned(ring, site.device, stride=site.tp)
    yield site.message("send_recv", "ring_attention", calls, prefill_bytes, ring, Per.prefill, nodes=nodes)
    summed = site.message(
        "all_reduce", "context_all_reduce", calls, decode_bytes, ring, Per.decode, nodes=nodes
    )

    def lines(rows: int, seqs: Any) -> Lines:
        return ((summed.seconds(_decodes(rows * seqs)), 0.0, 0.0, 0.0),)

    yield replace(summed, seconds=DecodeSeconds(lines))


def _decodes(seqs: Any) -> RankBatch:
    """Returns the batch of one iteration that decodes `seqs` sequences and nothing else."""
    return RankBatch(seqs, seqs, seqs, seqs, 0, 0, 0, 0, 0)


def beside_attention(site: Site, spec: BesideAttention, calls: float) -> Iterator[Operator]:
    """Yields softmax attention and the recurrent layer beside it, which the same GPU runs in turn."""
    yield from grouped_query(site, spec.attention, calls)
    yield from linear(site, spec.recurrent, calls)


OPERATORS: dict[type, Callable[[Site, Any, float], Iterator[Operator]]] = {
    GroupedQueryAttention: grouped_query,
    LatentAttention: latent,
    CompressedAttention: compressed,
    LinearAttention: linear,
    Mamba1: linear,
    Mamba2: linear,
    KimiDeltaAttention: linear,
    LightningAttention: linear,
    ShortConvolution: linear,
    BesideAttention: beside_attention,
}
"""Operator function per kind of attention; arguments: site, layer specification, number of such layers."""
