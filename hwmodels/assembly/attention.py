"""Attention operators of one layer on one rank, including projections, for each kind of attention.

Grouped-query attention and layers with a state of constant size (`RecurrentLayer`) are defined here, kinds of
latent attention in `latent.py`; `OPERATORS` maps kind to function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hwmodels.assembly.latent import both_phases, compressed, delay_beside_prefill, indexer, latent
from hwmodels.assembly.site import Site
from hwmodels.exact import Lines, Num, larger, smaller
from hwmodels.iterations import Explained, IterationModel, IterationShape, ends_of_decodes
from hwmodels.iterations.layout import RankBatch, decode_keys, decode_pairs, within_window
from hwmodels.iterations.ops import DecodeSeconds, Operator, Per, Quantity, per_token
from hwmodels.model.attention import (
    Attention,
    CompressedAttention,
    GroupedQueryAttention,
    LatentAttention,
    NoAttention,
)
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
from hwmodels.operators.gemm import stream_seconds
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
        # The state is stored after each row, because any row may be the last accepted one.
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
    # A query attends to the tokens of a window, or to those selected by the indexer.
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

    If a norm is over all heads, each rank first sums its squares in fp32: one kernel reads queries and keys,
    an all-reduce of two numbers per token follows, and another kernel reads and writes them.
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
    """Returns the batch of one iteration that only decodes `seqs` sequences."""
    return RankBatch(seqs, seqs, seqs, seqs, 0, 0, 0, 0, 0)


def beside_attention(site: Site, spec: BesideAttention, calls: float) -> Iterator[Operator]:
    """Yields softmax attention and the parallel recurrent layer, which the same GPU runs in turn."""
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


MATRIX_PASSES = 5
"""Number of times that the matrix of logits and weights passes through memory."""
SUM_BYTES = 12
"""Bytes moved per token and KV head for the sums of weights in fp32."""
STEP_KERNELS = 4
"""Additional kernels of unfused attention with sums, compared with the fused one."""
CUT_KERNELS = 6
"""Kernels that choose the kept tokens of a prompt by its last rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layers:
    count: int
    window: int | None
    pair_bytes: float
    """Bytes per query-key pair on one rank."""
    sum_bytes: float
    """Bytes per key for the sums."""
    key_bytes: float
    """Bytes of a cached key of all heads."""


class WithAttentionWeights:
    """An `IterationModel` that also reads attention weights; shapes have no draft tokens.

    base: prices everything else, with fused attention. decode_share: share of the heads whose weights every
    decode step reads. prompt_rows: number of last rows of a prompt whose weights are read at its end; None:
    the weights of every row are read. Fused (flash) kernels never write the weights to memory. If the weights
    are needed, attention is unfused, and the matrices of logits and weights (num_heads x queries x keys) pass
    through memory five times: logits are written, the softmax reads them and writes weights, and the output
    and the sums over queries read the weights. The sums, one fp32 number per token and KV head, are read,
    written, and read again by the selection. Per query-key pair and per key of one layer on one rank, with e
    bytes per element: 5 num_heads e and 12 num_kv_heads bytes, in 4 more kernels than fused attention
    Llama-3.1-8B in bf16, one decode of 2,048 kept tokens: 2,048 (5 x 32 x 2 + 12 x 8) = 852 kB per layer, a
    tenth of the 8.4 MB of its KV. A prompt cut by its last w rows (SnapKV) is scored once: its keys are read
    again, w rows of weights are computed, and 6 small kernels vote, pool, choose and gather. An iteration
    holds only sums, so its completed prompts are assumed to have the mean context of its chunks. FLOPs of the
    second product are not counted because it is memory-bound. No memory is reserved for the matrices.
    """

    def __init__(
        self, base: IterationModel, site: Site, *, decode_share: float, prompt_rows: int | None
    ) -> None:
        """Raises ValueError for a pipeline, whose stages would need separate prices."""
        if site.layout.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size={site.layout.pipeline_parallel_size}: a cache that reads attention "
                "weights is priced without pipelines only; set pipeline_parallel_size=1, or choose "
                "caching=streaming_llm"
            )
        self._base, self._site = base, site
        self._decode_share, self._prompt_rows = decode_share, prompt_rows
        self._layers = list(_layers_of(site))
        self.peak_flops_per_s = base.peak_flops_per_s
        self.peak_bytes_per_s = base.peak_bytes_per_s

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of the base, and of reading weights."""
        return self._base.seconds(shape) + self.weights_seconds(shape)

    def weights_seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of reading weights."""
        site = self._site
        return sum(
            layers.count * stream_seconds(moved, site.device, site.calibration.stream, kernels=kernels)
            for layers, moved, kernels in self._work(shape)
        )

    def weights_bytes(self, shape: IterationShape) -> Any:
        """Returns the bytes that reading weights moves on one rank."""
        return sum(layers.count * moved for layers, moved, _ in self._work(shape))

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive decode-only iterations; see `IterationModel`."""
        if not self._decode_share:
            return self._base.decode_ends(start_s, num_seqs, num_context_tokens, num_iterations)
        return ends_of_decodes(self.seconds, start_s, num_seqs, num_context_tokens, num_iterations)

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; reading weights is a part of attention."""
        parts = self._base.breakdown(shape)
        return parts | {"attention": parts["attention"] + self.weights_seconds(shape)}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of one iteration, the longest first."""
        added_s, total_s = float(self.weights_seconds(shape)), float(self.seconds(shape))
        moved = float(self.weights_bytes(shape))
        calls = sum(layers.count for layers in self._layers)
        lines = self._base.explain(shape)
        if added_s:
            name = "attention_weights"
            lines = [*lines, Explained(name, "attention", added_s, 0.0, "memory", 0.0, moved, calls)]
        shares = [line._replace(share=line.seconds / total_s) for line in lines]
        return sorted(shares, key=lambda line: -line.seconds)

    def flops(self, shape: IterationShape) -> Num:
        """Returns the model FLOPs, for MFU."""
        return self._base.flops(shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of weights and KV read, for MBU; attention weights do not count."""
        return self._base.bytes_moved(shape)

    def _work(self, shape: IterationShape) -> Iterator[tuple[_Layers, Any, Any]]:
        """Yields layers, bytes of one of them on one rank, and its kernels."""
        whole = self._site.layout.rank_batch(shape)
        rows = self._prompt_rows
        for layers in self._layers:
            batch = within_window(whole, layers.window)
            if self._decode_share:
                moved = batch.decode_context_tokens * (layers.pair_bytes + layers.sum_bytes)
                yield layers, self._decode_share * moved, STEP_KERNELS * smaller(batch.decode_seqs, 1)
            keys = batch.prefill_context_tokens
            if rows is None:
                moved = batch.prefill_pairs * layers.pair_bytes + keys * layers.sum_bytes
                yield layers, moved, STEP_KERNELS * smaller(batch.prefill_seqs, 1)
            else:
                ends = larger(batch.rows - batch.decode_seqs, 0)
                keys = ends * keys / larger(batch.prefill_seqs, 1)
                moved = keys * (layers.key_bytes + rows * layers.pair_bytes)
                yield layers, moved, CUT_KERNELS * smaller(ends, 1)


def _layers_of(site: Site) -> Iterator[_Layers]:
    """Yields the layers with softmax attention."""
    model, tp = site.model, site.tp
    for block in model.blocks:
        attention = block.attention
        if isinstance(attention, RecurrentLayer | NoAttention):
            continue
        grouped = isinstance(attention, GroupedQueryAttention)
        kv_heads = attention.kv_heads_per_rank(tp) if isinstance(attention, GroupedQueryAttention) else 1
        kv_bytes = attention.kv_bytes_per_token(model.kv_dtype, tp)
        yield _Layers(
            count=block.count,
            window=attention.window,
            pair_bytes=MATRIX_PASSES * attention.num_query_heads / tp * model.element_bytes,
            sum_bytes=SUM_BYTES * kv_heads,
            key_bytes=kv_bytes / 2 if grouped else kv_bytes,
        )
