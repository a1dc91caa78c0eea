"""The price of attention weights that a cache reads to choose the tokens that it keeps.

Fused (flash) kernels never write the weights to memory. Where they are needed, attention is unfused, and the
matrices of logits and weights, num_heads x queries x keys, go through memory five times: logits are written,
the softmax reads them and writes weights, the output and the sums over queries read those. The sums, one fp32
number per token and KV head, are read, written, and read again by the choice. Per query-key pair and per key
of one layer on one rank, with e bytes per element:

    5 num_heads e   and   12 num_kv_heads   bytes, in 4 kernels more than fused attention has

Llama-3.1-8B in bf16, one decode of 2,048 kept tokens: 2,048 (5 x 32 x 2 + 12 x 8) = 852 kB per layer, a tenth
of the 8.4 MB of its KV. A prompt cut by its last w rows (SnapKV) is scored once: its keys are read again, w
rows of weights are made, and 6 small kernels vote, pool, choose and gather. An iteration holds only sums, so
the prompts that end in it have the mean context of its chunks. FLOPs of the second product are not counted:
memory bounds it. The memory for the matrices is not reserved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hwmodels.assembly.site import Site
from hwmodels.exact import Num, larger, smaller
from hwmodels.iterations.iteration import Explained, IterationModel, IterationShape, ends_of_decodes
from hwmodels.iterations.layout import within_window
from hwmodels.model.attention import GroupedQueryAttention, NoAttention
from hwmodels.model.recurrent import RecurrentLayer
from hwmodels.operators.gemm import stream_seconds

MATRIX_PASSES = 5
"""Times that the matrix of logits and weights goes through memory."""
SUM_BYTES = 12
"""Bytes moved per token and KV head for the sums of weights in fp32."""
STEP_KERNELS = 4
"""Kernels of unfused attention with sums, beyond the fused one."""
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
    decode step reads. prompt_rows: last rows of a prompt whose weights are read at its end; None: those of
    every row are.
    """

    def __init__(
        self, base: IterationModel, site: Site, *, decode_share: float, prompt_rows: int | None
    ) -> None:
        """Raises ValueError for a pipeline, whose stages would have to be priced one by one."""
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
