"""Operators of attention over a window and compressed entries (DeepSeek-V4), of one layer on one rank.

Queries and outputs are those of absorbed latent attention: all heads attend to one vector per entry, 2 h 2 d
FLOPs per query and entry for h heads and width d. So its kernels are priced by the curve of latent attention
(`hwmodels.operators.mla`), with entries in place of tokens: a context of c tokens has min(c, w) entries in
the window, and min(c / r, k) compressed ones. Never measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hwmodels.assembly.latent import each_its_own, indexer
from hwmodels.assembly.phases import both_phases
from hwmodels.assembly.site import Site
from hwmodels.exact import Lines
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.ops import DecodeSeconds, Operator
from hwmodels.iterations.windows import decode_pairs, within_window
from hwmodels.model.compressed_attention import CompressedAttention
from hwmodels.model.matrices import share_of
from hwmodels.operators.mla import MlaDecode, MlaHeads, MlaPrefill

STREAM_PASSES = 10
"""Hidden states that hyper-connections of 4 streams read and write around attention or an MLP.

4 read and 1 written before it, 5 read and 4 written after it, less those of the residual sum in the norm.
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
