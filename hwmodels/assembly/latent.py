"""Operators of latent attention (MLA), and of attention to compressed entries, of one layer on one rank.

In attention over a window and compressed entries (DeepSeek-V4), queries and outputs are as in absorbed latent
attention: all heads attend to one vector per entry, 2 h 2 d FLOPs per query and entry for h heads and width
d. Its kernels are therefore priced by the curve of latent attention (`hwmodels.operators.mla`), with entries
instead of tokens: a context of c tokens has min(c, w) entries in the window, and min(c / r, k) compressed
ones. Never measured.

Decode and prefill are two phases of one kernel (`both_phases`), which grouped-query attention shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from hwmodels.assembly.site import Site
from hwmodels.exact import Lines, larger, smaller
from hwmodels.iterations.layout import RankBatch, decode_keys, decode_pairs, within_window
from hwmodels.iterations.ops import DecodeSeconds, Operator, Per, Quantity, zero
from hwmodels.model.attention import CompressedAttention, LatentAttention
from hwmodels.model.weights import KV_BYTES, KV_SCALE_BYTES, Role, share_of
from hwmodels.operators.attention import DecodeAttention, HeadLayout
from hwmodels.operators.mla import MlaDecode, MlaHeads, MlaPrefill

EXPANSION_PEAK_SHARE = 0.7
"""Share of the dense peak reached by the GEMM that expands thousands of cached latent vectors."""

TRTLLM_LAUNCHES = 20
"""Additional launches per layer if prompts and decodes share an iteration of TensorRT-LLM. It runs such an
iteration without CUDA graphs, and runs attention twice: after the prompts' path comes the decodes' path, with
products that absorb queries and outputs, rotary embedding, set-up and attention, surrounded by thirty views
and allocations in Python, and calls with eighty arguments. The number was fitted to InferenceMAX's rows of
DeepSeek-R1. Prefill-only workers do not need these launches.
"""

TRTLLM_BLOCK_LAUNCHES = 24
"""Additional launches with block-scaled fp8 weights: three for each of eight products, whose inputs are
quantised by Python functions; checkpoints in nvfp4 keep most MLA matrices in bf16. Fitted to the same rows.
"""


def latent(site: Site, spec: LatentAttention, calls: float) -> Iterator[Operator]:
    """Yields MLA: projections of queries and compressed keys and values, norms, attention, output projection.

    kv_b_proj has one form for prompt chunks (it expands their keys and values) and one for absorbed decodes
    (it is folded into queries and outputs); both multiply each new token by its matrix once. The cached
    context of a chunk is expanded again in each iteration, as is the complete context of non-absorbed
    decodes.
    """
    if site.device.systolic is not None:
        raise ValueError(
            f"hardware={site.device.name}: latent attention ({site.model.name}) has no price on systolic "
            "arrays; choose a GPU, or a model with grouped-query attention"
        )
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
    if normed := (spec.q_lora_rank or 0) + spec.made_width:
        yield site.stream("latent_norm", calls, 2 * normed * b)
    if spec.qk_rope_head_dim:
        q_width = heads_here * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        yield site.stream("rotary", calls, 2 * (q_width + spec.qk_rope_head_dim) * b)
    if not spec.shares_kv:
        yield site.stream("kv_write", calls, spec.latent_width * (b + kv_element_bytes))
    if spec.has_indexer:
        key_bytes, ratio = spec.index_key_bytes, spec.index_ratio
        yield from indexer(site, spec.index_n_heads, spec.index_head_dim, key_bytes, calls, ratio)
    expanded = HeadLayout(
        num_heads=heads_here,
        num_kv_heads=heads_here,
        head_dim=spec.qk_nope_head_dim + spec.qk_rope_head_dim,
        v_head_dim=spec.v_head_dim,
        kv_bytes_per_element=b,
    )
    reach = spec.window if spec.sparse_top_k is None else spec.sparse_top_k
    yield from expansion(site, kv_b_proj.elements, heads, expanded, reach, calls)
    yield from latent_attention(site, heads, expanded, reach, calls, selected=spec.sparse_top_k is not None)
    if spec.output_gate or spec.head_gate or spec.query_gate:
        yield site.stream("output_gate", calls, 3 * heads_here * spec.v_head_dim * b)
    yield from site.gemm(o_proj, calls)


def mixed_launches(site: Site) -> int:
    """Returns a layer's additional launches if prompts and decodes share an iteration."""
    if site.kernels.library != "trtllm":
        return 0
    weights, _ = site.stored(Role.dense)
    return TRTLLM_LAUNCHES + TRTLLM_BLOCK_LAUNCHES * (weights.name == "fp8_block")


def latent_attention(
    site: Site, heads: MlaHeads, expanded: HeadLayout, top_k: int | None, calls: float, *, selected: bool
) -> Iterator[Operator]:
    """Yields attention: chunks attend to expanded keys and values, absorbed decodes to the latent vectors.

    A non-absorbed decode is multi-head attention over expanded keys and values, which are separate per head.
    The expansion then reads the stored latent vectors. top_k: maximum number of tokens that a query attends
    to. selected: whether an indexer selects them per query; if not, they are the last ones.
    """
    curve, library = site.calibration.mla, site.kernels.library
    absorbed = site.kernels.absorbed_latent_decode

    @cache
    def decode(rows: int) -> DecodeAttention | MlaDecode:
        if absorbed:
            return MlaDecode(heads, site.device, curve, library, rows)
        return DecodeAttention(expanded, site.device, site.calibration.attention, library, rows, site.dtype)

    def lines(rows: int, seqs: Any) -> Lines:
        if not absorbed or not selected:
            return decode(rows).lines(seqs)
        return each_its_own(decode(1).lines(rows * seqs))

    prefill = MlaPrefill(heads, site.device, curve, library, site.dtype)
    token_flops = heads.decode_flops_per_token if absorbed else expanded.flops_per_pair
    token_bytes = heads.latent_bytes_per_token if absorbed else expanded.kv_bytes_per_token

    def decode_bytes(batch: RankBatch) -> Any:
        read = decode_pairs(batch, top_k) if selected else decode_keys(batch, top_k)
        return token_bytes * read

    def prefill_bytes(batch: RankBatch) -> Any:
        return heads.latent_bytes_per_token * within_window(batch, top_k).prefill_context_tokens

    def prefill_seconds(batch: RankBatch) -> Any:
        cut = within_window(batch, top_k)
        return prefill.seconds(
            cut.prefill_seqs, cut.prefill_tokens, cut.prefill_pairs, cut.prefill_context_tokens
        )

    yield from both_phases(
        site,
        "" if top_k is None else f"_{'top' if selected else 'window'}_{top_k}",
        calls,
        (DecodeSeconds(lines, top_k), prefill_seconds),
        (
            lambda b: token_flops * decode_pairs(b, top_k),
            lambda b: heads.prefill_flops_per_pair * within_window(b, top_k).prefill_pairs,
        ),
        (decode_bytes if absorbed else zero, prefill_bytes),
        (decode_bytes, prefill_bytes),
        mixed_kernels=mixed_launches(site),
    )
    alone = decode(1)
    if isinstance(alone, DecodeAttention) and alone.beside_prefill > 1:
        yield delay_beside_prefill(site, alone, top_k, calls)


def each_its_own(lines: Lines) -> Lines:
    """Returns the lines of rows that select different keys: each reads its own, like a sequence."""
    return tuple((fixed_s, 0.0, key_s, 0.0) for fixed_s, key_s, _, _ in lines)


def expansion(
    site: Site, elements: float, heads: MlaHeads, expanded: HeadLayout, top_k: int | None, calls: float
) -> Iterator[Operator]:
    """Yields the GEMM that expands cached latent vectors to keys and values; elements: weights of kv_b_proj.

    It expands the cached context of prompt chunks and, for non-absorbed decode, every attended context token.
    A token takes 2 elements FLOPs; its latent vector is read, heads (nope + rope + v) b bytes are written.
    The time is the larger of compute and memory time, plus the start of a kernel.
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
        # No kernel runs if no token is cached.
        return stream.start_s * smaller(cached(batch), 1.0) + token_s * cached(batch)

    yield made("latent_expansion", Per.prefill, cached, cached_seconds, zero)
    if site.kernels.absorbed_latent_decode:
        return

    def context(batch: RankBatch) -> Any:
        return decode_keys(batch, top_k)

    def lines(rows: int, seqs: Any) -> Lines:
        return ((stream.start_s * smaller(seqs, 1), token_s, 0.0, 0.0),)

    yield made(
        "latent_expansion_decode",
        Per.decode,
        context,
        DecodeSeconds(lines, top_k),
        lambda batch: read_bytes * context(batch),
    )


def indexer(
    site: Site, num_heads: int, head_dim: int, key_bytes: float, calls: float, ratio: int = 1
) -> Iterator[Operator]:
    """Yields the scores of all cached tokens by small keys, which select the top k (DeepSeek-V3.2).

    key_bytes: of one key; ratio: number of tokens that share one (DeepSeek-V4).
    """
    key_bytes = key_bytes / ratio
    pair_flops = 2.0 * num_heads * head_dim / ratio
    dtype = "fp8" if "fp8" in site.device.peak_flops_per_s else site.dtype
    peak = site.device.peak_flops_per_s[dtype] * site.calibration.attention.flops_share
    bandwidth = site.device.memory_bandwidth_bytes_per_s * site.calibration.stream.bandwidth_share
    start_s = 2 * site.calibration.stream.start_s
    pair_s, key_s = pair_flops / peak, key_bytes / bandwidth

    def lines(rows: int, seqs: Any) -> Lines:
        started_s = start_s * smaller(seqs, 1)
        return (started_s, 0.0, pair_s, 0.0), (started_s, key_s, 0.0, 0.0)

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

    yield scored(Per.decode, DecodeSeconds(lines), decode_pairs, decode_keys)
    yield scored(Per.prefill, prefill_seconds, lambda b: b.prefill_pairs, lambda b: b.prefill_context_tokens)


STREAM_PASSES = 10
"""Hidden states that hyper-connections of 4 streams read and write around attention or an MLP.

4 read and 1 written before it, 5 read and 4 written after it, minus those of the residual sum in the norm.
"""


def compressed(site: Site, spec: CompressedAttention, calls: float) -> Iterator[Operator]:
    """Yields projections, compressor, indexer, attention to window and entries, and output projections."""
    if site.device.systolic is not None:
        raise ValueError(
            f"hardware={site.device.name}: compressed attention ({site.model.name}) has no price on systolic "
            "arrays; choose a GPU, or a model with grouped-query attention"
        )
    b, entry_bytes = site.model.element_bytes, spec.entry_bytes(site.model.kv_dtype)
    heads = share_of(spec.num_heads, site.tp)
    *before, o_a_proj, o_b_proj = spec.matrices(site.model.hidden_size, site.tp)
    if spec.num_streams > 1:
        passes = STREAM_PASSES / 4 * spec.num_streams
        yield site.stream("hyper_connections", 2 * calls, passes * site.hidden_bytes)
    for matrix in before:
        yield from site.gemm(matrix, calls)
    yield site.stream("latent_norm", calls, 2 * (spec.q_lora_rank + spec.head_dim) * b)
    yield site.stream("rotary", calls, 2 * (2 * heads + 1) * spec.rope_head_dim * b)
    yield site.stream("kv_write", calls, spec.head_dim * b + entry_bytes)
    if spec.ratio:
        width = 2 * spec.num_series * (spec.head_dim + spec.index_head_dim)
        yield site.stream("compressor", calls, 2 * width * b)
    yield from attended(site, spec, "_window", spec.window_tokens, 1, calls)
    if spec.ratio:
        if spec.sparse_top_k is not None:
            key_bytes = spec.index_entry_bytes
            yield from indexer(site, spec.index_n_heads, spec.index_head_dim, key_bytes, calls, spec.ratio)
        reach = None if spec.sparse_top_k is None else spec.sparse_top_k * spec.ratio
        yield from attended(site, spec, "_compressed", reach, spec.ratio, calls)
    yield from site.gemm(o_a_proj, calls)
    yield from site.gemm(o_b_proj, calls)


def attended(
    site: Site, spec: CompressedAttention, suffix: str, reach: int | None, ratio: int, calls: float
) -> Iterator[Operator]:
    """Yields attention to the last `reach` tokens, of which `ratio` share an entry; None: to all of them."""
    entry_bytes = spec.entry_bytes(site.model.kv_dtype)
    heads = MlaHeads(
        num_heads=share_of(spec.num_heads, site.tp),
        # 2 (latent) + rope = 2 head_dim: the products of a query with an entry as key and as value.
        kv_lora_rank=spec.head_dim - spec.rope_head_dim // 2,
        rope_head_dim=spec.rope_head_dim,
        nope_head_dim=spec.head_dim - spec.rope_head_dim,
        v_head_dim=spec.head_dim,
        kv_bytes_per_element=entry_bytes / (spec.head_dim + spec.rope_head_dim // 2),
    )
    curve, library = site.calibration.mla, site.kernels.library
    decode = MlaDecode(heads, site.device, curve, library)
    prefill = MlaPrefill(heads, site.device, curve, library, site.dtype)

    def lines(rows: int, seqs: Any) -> Lines:
        own = each_its_own(decode.lines(rows * seqs))
        return tuple((fixed_s, 0.0, token_s / ratio, 0.0) for fixed_s, _, token_s, _ in own)

    def entries(batch: RankBatch) -> Any:
        return decode_pairs(batch, reach) / ratio

    def prefill_seconds(batch: RankBatch) -> Any:
        cut = within_window(batch, reach)
        context = cut.prefill_context_tokens / ratio
        return prefill.seconds(cut.prefill_seqs, cut.prefill_tokens, cut.prefill_pairs / ratio, context)

    yield from both_phases(
        site,
        suffix,
        calls,
        (DecodeSeconds(lines, reach), prefill_seconds),
        (
            lambda b: heads.decode_flops_per_token * entries(b),
            lambda b: heads.prefill_flops_per_pair * within_window(b, reach).prefill_pairs / ratio,
        ),
        (
            lambda b: entry_bytes * entries(b),
            lambda b: entry_bytes * within_window(b, reach).prefill_context_tokens / ratio,
        ),
    )


def both_phases(
    site: Site,
    suffix: str,
    calls: float,
    seconds: tuple[Quantity, Quantity],
    flops: tuple[Quantity, Quantity],
    stored: tuple[Quantity, Quantity],
    moved: tuple[Quantity, Quantity] | None = None,
    *,
    mixed_kernels: int = 0,
) -> Iterator[Operator]:
    """Yields the decode and the prefill operator; moved: bytes, if they differ from the stored bytes.

    mixed_kernels: additional launches if both phases are in one iteration.
    """
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
            kernels=1 - i,  # the two phases share one kernel
            mixed_kernels=mixed_kernels * i,
        )


def delay_beside_prefill(site: Site, decode: DecodeAttention, window: int | None, calls: float) -> Operator:
    """Returns the time that decodes lose in a kernel that also processes prompt chunks (FlashAttention-2)."""
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
