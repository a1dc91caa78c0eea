"""The operators of each kind of attention, projections included, of one layer on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hwmodels.assembly.linear import linear
from hwmodels.assembly.site import Site
from hwmodels.exact import larger, smaller
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.ops import (
    DecodeSeconds,
    Lines,
    Operator,
    Per,
    Quantity,
    nothing,
    whatever_the_context,
)
from hwmodels.model.attention import GroupedQueryAttention, LatentAttention, LinearAttention
from hwmodels.model.matrices import share_of
from hwmodels.model.quantization import KV_BYTES, KV_SCALE_BYTES
from hwmodels.model.windows import within_window
from hwmodels.operators.attention import DecodeAttention, HeadLayout, PrefillAttention
from hwmodels.operators.mla import MlaDecode, MlaHeads, MlaPrefill

EXPANSION_PEAK_SHARE = 0.7
"""Of the dense peak, by the GEMM that expands thousands of cached latent vectors."""


def attention_operators(
    site: Site, spec: GroupedQueryAttention | LatentAttention | LinearAttention, calls: float
) -> Iterator[Operator]:
    match spec:
        case GroupedQueryAttention():
            yield from grouped_query(site, spec, calls)
        case LatentAttention():
            yield from latent(site, spec, calls)
        case LinearAttention():
            yield from linear(site, spec, calls)


def grouped_query(site: Site, spec: GroupedQueryAttention, calls: float) -> Iterator[Operator]:
    qkv_proj, o_proj = spec.matrices(site.model.hidden_size, site.tp)
    scale_bytes = KV_SCALE_BYTES.get(site.model.kv_dtype, 0.0)
    kv_element_bytes = KV_BYTES[site.model.kv_dtype] + scale_bytes / spec.head_dim
    heads = HeadLayout(
        num_heads=share_of(spec.num_heads, site.tp),
        num_kv_heads=spec.kv_heads_per_rank(site.tp),
        head_dim=spec.head_dim,
        kv_bytes_per_element=kv_element_bytes,
        windowed=spec.window is not None,
    )
    b = site.model.element_bytes
    q_width, kv_width = heads.num_heads * spec.head_dim, heads.num_kv_heads * spec.head_dim
    yield from site.gemm(qkv_proj, calls)
    if spec.qk_norm:
        yield site.stream("qk_norm", calls, 2 * (q_width + kv_width) * b)
    yield site.stream("rotary", calls, 2 * (q_width + kv_width) * b)
    if not spec.shares_kv:
        yield site.stream("kv_write", calls, 2 * kv_width * (b + heads.kv_bytes_per_element))
    yield from softmax_attention(site, heads, spec.window, calls)
    if site.layout.context_parallel_size > 1:
        kv_bytes, q_bytes = heads.kv_bytes_per_token, q_width * b
        yield from around_the_ring(site, kv_bytes, q_bytes, calls)
    if spec.output_gate:
        yield site.stream("output_gate", calls, 3 * q_width * b)
    yield from site.gemm(o_proj, calls)


def softmax_attention(site: Site, heads: HeadLayout, window: int | None, calls: float) -> Iterator[Operator]:
    """Decodes and chunks in one variable-length kernel, as in vLLM; each part with a price of its own."""
    curve, library = site.calibration.attention, site.kernels.library
    decode = DecodeAttention(heads, site.device, curve, library)
    prefill = PrefillAttention(heads, site.device, curve, library, site.dtype)
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
        (DecodeSeconds(decode.lines, window), prefill_seconds),
        (
            lambda b: heads.flops_per_pair * within_window(b, window).decode_context_tokens,
            lambda b: heads.flops_per_pair * within_window(b, window).prefill_pairs,
        ),
        (
            lambda b: heads.kv_bytes_per_token * within_window(b, window).decode_context_tokens,
            lambda b: heads.kv_bytes_per_token * within_window(b, window).prefill_context_tokens,
        ),
    )
    if decode.beside_prefill > 1:
        yield delay_beside_prefill(site, decode, window, calls)


def delay_beside_prefill(site: Site, decode: DecodeAttention, window: int | None, calls: float) -> Operator:
    """What decodes take longer in a kernel that also works on prompt chunks (FlashAttention-2)."""
    longer = decode.beside_prefill - 1

    def seconds(batch: RankBatch) -> Any:
        cut = within_window(batch, window)
        alone_s = decode.seconds(cut.decode_seqs, cut.decode_context_tokens)
        return longer * alone_s * smaller(batch.prefill_seqs, 1)

    return Operator(
        name="attention_decode_beside_prefill",
        component="attention",
        per=Per.prefill,
        calls=calls,
        seconds=seconds,
        dtype=site.dtype,
        kernels=0,
    )


def both_phases(
    site: Site,
    suffix: str,
    calls: float,
    seconds: tuple[Quantity, Quantity],
    flops: tuple[Quantity, Quantity],
    stored: tuple[Quantity, Quantity],
    moved: tuple[Quantity, Quantity] | None = None,
) -> Iterator[Operator]:
    """Decode and prefill; moved: bytes, where they are not those that are stored."""
    for i, phase in enumerate(("decode", "prefill")):
        yield Operator(
            name=f"attention_{phase}{suffix}",
            component="attention",
            per=(Per.decode, Per.prefill)[i],
            calls=calls,
            seconds=seconds[i],
            flops=flops[i],
            stored_bytes=stored[i],
            bytes_moved=(moved or stored)[i],
            dtype=site.dtype,
            kernels=1 - i,  # they share one
        )


def around_the_ring(site: Site, kv_bytes: float, q_bytes: float, calls: float) -> Iterator[Operator]:
    """Context parallel: what travels among the devices that share a sequence.

    Prefill: the shares of keys and values go round (pass-KV), or those of the queries and their partial
    results where they are fewer (pass-Q). Decode: queries are on every device; partial results are summed.
    """
    ring = site.layout.context_parallel_size

    def prefill_bytes(batch: RankBatch) -> Any:
        pass_kv = kv_bytes * batch.prefill_context_tokens
        pass_q = 2 * q_bytes * ring * batch.prefill_tokens
        return smaller(pass_kv, pass_q) * (ring - 1) / ring

    def decode_bytes(batch: RankBatch) -> Any:
        return q_bytes * batch.decode_seqs

    nodes = site.layout.nodes_spanned(ring, site.device, stride=site.tp)
    yield site.message("send_recv", "ring_attention", calls, prefill_bytes, ring, Per.prefill, nodes=nodes)
    summed = site.message(
        "all_reduce", "context_all_reduce", calls, decode_bytes, ring, Per.decode, nodes=nodes
    )
    per_batch = summed.seconds
    yield replace(summed, seconds=whatever_the_context(lambda seqs: per_batch(_decodes(seqs))))


def _decodes(seqs: Any) -> RankBatch:
    """A batch of so many decodes."""
    return RankBatch(seqs, seqs, seqs, seqs, 0, 0, 0, 0, 0)


def latent(site: Site, spec: LatentAttention, calls: float) -> Iterator[Operator]:
    """MLA. Projections of queries and of the compressed keys and values, norms, attention, output.

    kv_b_proj has one form for chunks (it expands their keys and values) and one for absorbed decodes (it is
    folded into queries and outputs); both multiply each new token by its matrix once. What chunks have cached
    is expanded again, each time; so is the whole context of decodes that are not absorbed.
    """
    b, heads_here = site.model.element_bytes, share_of(spec.num_heads, site.tp)
    scale_bytes = KV_SCALE_BYTES.get(site.model.kv_dtype, 0.0)
    kv_element_bytes = KV_BYTES[site.model.kv_dtype] + scale_bytes / spec.latent_width
    heads = MlaHeads(
        num_heads=heads_here,
        kv_lora_rank=spec.kv_lora_rank,
        rope_head_dim=spec.qk_rope_head_dim,
        nope_head_dim=spec.qk_nope_head_dim,
        v_head_dim=spec.v_head_dim,
        kv_bytes_per_element=kv_element_bytes,
    )
    by_name = {matrix.name: matrix for matrix in spec.matrices(site.model.hidden_size, site.tp)}
    o_proj, kv_b_proj = by_name.pop("o_proj"), by_name["kv_b_proj"]
    for matrix in by_name.values():
        yield from site.gemm(matrix, calls)
    yield site.stream("latent_norm", calls, 2 * ((spec.q_lora_rank or 0) + spec.latent_width) * b)
    q_width = heads_here * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
    yield site.stream("rotary", calls, 2 * (q_width + spec.qk_rope_head_dim) * b)
    yield site.stream("kv_write", calls, spec.latent_width * (b + kv_element_bytes))
    if spec.sparse_top_k is not None:
        yield from indexer(site, spec, calls)
    expanded = HeadLayout(
        num_heads=heads_here,
        num_kv_heads=heads_here,
        head_dim=spec.qk_nope_head_dim + spec.qk_rope_head_dim,
        v_head_dim=spec.v_head_dim,
        kv_bytes_per_element=b,
    )
    yield from expansion(site, kv_b_proj.elements, heads, expanded, spec.sparse_top_k, calls)
    yield from latent_attention(site, heads, expanded, spec.sparse_top_k, calls)
    yield from site.gemm(o_proj, calls)


def latent_attention(
    site: Site, heads: MlaHeads, expanded: HeadLayout, top_k: int | None, calls: float
) -> Iterator[Operator]:
    """Chunks attend to expanded keys and values, absorbed decodes to the latent vectors themselves.

    A naive decode is multi-head attention over expanded ones, each head with keys and values of its own. What
    is stored, latent vectors, is then read by the expansion.
    """
    curve, library = site.calibration.mla, site.kernels.library
    absorbed = site.kernels.absorbed_latent_decode
    naive = DecodeAttention(expanded, site.device, site.calibration.attention, library)
    decode = MlaDecode(heads, site.device, curve, library) if absorbed else naive
    prefill = MlaPrefill(heads, site.device, curve, library, site.dtype)
    token_flops = heads.decode_flops_per_token if absorbed else expanded.flops_per_pair
    token_bytes = heads.latent_bytes_per_token if absorbed else expanded.kv_bytes_per_token

    def decode_bytes(batch: RankBatch) -> Any:
        return token_bytes * within_window(batch, top_k).decode_context_tokens

    def prefill_bytes(batch: RankBatch) -> Any:
        return heads.latent_bytes_per_token * within_window(batch, top_k).prefill_context_tokens

    def prefill_seconds(batch: RankBatch) -> Any:
        cut = within_window(batch, top_k)
        return prefill.seconds(
            cut.prefill_seqs, cut.prefill_tokens, cut.prefill_pairs, cut.prefill_context_tokens
        )

    yield from both_phases(
        site,
        "" if top_k is None else f"_top_{top_k}",
        calls,
        (DecodeSeconds(decode.lines, top_k), prefill_seconds),
        (
            lambda b: token_flops * within_window(b, top_k).decode_context_tokens,
            lambda b: heads.prefill_flops_per_pair * within_window(b, top_k).prefill_pairs,
        ),
        (decode_bytes if absorbed else nothing, prefill_bytes),
        (decode_bytes, prefill_bytes),
    )
    if not absorbed and naive.beside_prefill > 1:
        yield delay_beside_prefill(site, naive, top_k, calls)


def expansion(
    site: Site, elements: float, heads: MlaHeads, expanded: HeadLayout, top_k: int | None, calls: float
) -> Iterator[Operator]:
    """Keys and values of cached tokens, made again from their latent vectors by kv_b_proj (elements).

    Of what chunks have cached; and, where decode is not absorbed, of every context token that is attended to.
    A token takes 2 elements FLOPs; its latent vector is read, heads (nope + rope + v) b bytes are written.
    Whichever takes longer, and the start of a kernel.
    """
    read_bytes = heads.latent_bytes_per_token
    token_bytes = read_bytes + expanded.kv_bytes_per_token
    stream = site.calibration.stream
    flops_s = 2.0 * elements / (site.device.peak_flops_per_s[site.dtype] * EXPANSION_PEAK_SHARE)
    bytes_s = token_bytes / (site.device.memory_bandwidth_bytes_per_s * stream.bandwidth_share)
    token_s = max(flops_s, bytes_s)

    def made(name: str, per: Per, tokens: Quantity, seconds: Quantity, stored: Quantity) -> Operator:
        return Operator(
            name=name,
            component="attention",
            per=per,
            calls=calls,
            seconds=seconds,
            flops=lambda batch: 2.0 * elements * tokens(batch),
            stored_bytes=stored,
            bytes_moved=lambda batch: token_bytes * tokens(batch),
            dtype=site.dtype,
        )

    def cached(batch: RankBatch) -> Any:
        return larger(batch.prefill_context_tokens - batch.prefill_tokens, 0.0)

    def cached_seconds(batch: RankBatch) -> Any:
        # No kernel where nothing is cached.
        return stream.start_s * smaller(cached(batch), 1.0) + token_s * cached(batch)

    yield made("latent_expansion", Per.prefill, cached, cached_seconds, nothing)
    if site.kernels.absorbed_latent_decode:
        return

    def context(batch: RankBatch) -> Any:
        return within_window(batch, top_k).decode_context_tokens

    def lines(seqs: Any) -> Lines:
        return ((stream.start_s * smaller(seqs, 1), token_s),)

    yield made(
        "latent_expansion_decode",
        Per.decode,
        context,
        DecodeSeconds(lines, top_k),
        lambda batch: read_bytes * context(batch),
    )


def indexer(site: Site, spec: LatentAttention, calls: float) -> Iterator[Operator]:
    """Scores every cached token with small fp8 keys, to pick those that are attended to (DeepSeek-V3.2)."""
    key_bytes = spec.index_head_dim + 4.0
    pair_flops = 2.0 * spec.index_n_heads * spec.index_head_dim
    dtype = "fp8" if "fp8" in site.device.peak_flops_per_s else site.dtype
    peak = site.device.peak_flops_per_s[dtype] * site.calibration.attention.flops_share
    bandwidth = site.device.memory_bandwidth_bytes_per_s * site.calibration.stream.bandwidth_share
    start_s = 2 * site.calibration.stream.start_s
    pair_s, key_s = pair_flops / peak, key_bytes / bandwidth

    def decode_lines(seqs: Any) -> Lines:
        started_s = start_s * smaller(seqs, 1)
        return (started_s, pair_s), (started_s, key_s)

    def prefill_seconds(batch: RankBatch) -> Any:
        busy_s = larger(pair_s * batch.prefill_pairs, key_s * batch.prefill_context_tokens)
        return start_s * smaller(batch.prefill_seqs, 1) + busy_s

    def scored(per: Per, seconds: Quantity, pairs: Quantity, keys: Quantity) -> Operator:
        return Operator(
            name=f"indexer_{per.name}",
            component="attention",
            per=per,
            calls=calls,
            seconds=seconds,
            flops=lambda batch: pair_flops * pairs(batch),
            stored_bytes=lambda batch: key_bytes * keys(batch),
            bytes_moved=lambda batch: key_bytes * keys(batch),
            dtype=dtype,
            kernels=2 if per is Per.decode else 0,
        )

    def context(batch: RankBatch) -> Any:
        return batch.decode_context_tokens

    yield scored(Per.decode, DecodeSeconds(decode_lines), context, context)
    yield scored(Per.prefill, prefill_seconds, lambda b: b.prefill_pairs, lambda b: b.prefill_context_tokens)
