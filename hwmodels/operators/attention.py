"""Attention over cached keys and values: one query token per sequence (decode), or prompt chunks (prefill).

Times are seconds of one call (one layer) on one device. Decode reads every key and value once; with few
sequences their contexts are split so that all SMs work (FlashDecoding: Dao et al., 2023), then merged:

    decode   t = start + max(items, merge + stream, merge + k (items + stream))
             items   one KV head of one sequence occupies an SM for item_s, however short its context;
                     in waves over the SMs, of which the first is in the start
             stream  bytes of keys and values / (bandwidth share busy); k: how far the two hide each other
             busy    share of the SMs that have a part of a context: min(1, items max_splits / SMs)

Draft tokens that a pass verifies are further query rows of their sequence: keys and values are read once, the
rows of all heads that share a pass over the keys fill tiles of 128, and every pair of query and key is
multiplied, like those of prefill, on the SMs that have a part of a context.

Prefill is compute-bound. Tiles of 128 queries are distributed over the SMs (FlashAttention-2: Dao, 2023);
each starts up, loads its queries and computes the masked half of its diagonal. A pair costs its products, and
an exponential that tensor cores do not compute (FlashAttention-3: Shah et al., 2024, section 3.1). The tile
of the last queries of a prompt processes all its keys in sequence on one SM: half of that chain is the tail.

    prefill  t = start + max(work + chain / 2, chain)
             work = pairs heads (4 head_dim / (peak share) + 1 / exponentials per second)
                    + heads tiles tile_s / SMs + bytes of keys and values / (bandwidth share)

Figures of a device are in `AttentionCurve`; differences between families of kernels, equal on every device,
are in `hwmodels.operators.attention_kernels`. With the defaults of both, vLLM on an H100, 32 query and 8 KV
heads of 128 in bf16, 64 sequences of 4,096 tokens: 1.074e9 bytes at 0.82 x 3.35e12 bytes/s take 391 us; with
9.5 us of start and 2.5 us of merge 403 us.

Numbers and arrays give the same bits (`hwmodels.exact`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Any

import numpy as np
from numpy import ndarray

from hwmodels.checks import check_curve, check_finite
from hwmodels.device import Device
from hwmodels.exact import Lines, highest, larger, smaller
from hwmodels.operators.attention_kernels import CHOICES, KERNELS, Kernels

TILE_QUERIES = 128
"""Queries of one tile of prefill attention."""

EXPONENTIALS_PER_SM_S = 45e9
"""Visible exponentials per SM and second: the unit does 16 a clock, 29e9 at 1.8 GHz; products hide some."""

UNPACK_OPERATIONS = 5
"""Operations of CUDA cores per 4-bit element of keys and values: mask, shift, convert, subtract, scale.

QServe: Lin et al., MLSys 2025, section on KV4 attention.
"""

L2_OVER_MEMORY = 1.5
"""Bandwidth of the L2 cache over that of memory, if query heads read the same keys one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadLayout:
    """Attention heads of one rank."""

    num_heads: float
    num_kv_heads: float
    head_dim: int
    kv_bytes_per_element: float = 2.0
    """Bytes per element of the cache; 2: bf16, 1: fp8 (with other kernels), less: priced as fp8."""
    v_head_dim: int | None = None
    """Width of the values; None: that of the keys."""
    windowed: bool = False
    """True for a sliding window: the caller passes the tokens and pairs inside it."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "kv_bytes_per_element"):
            check_finite(name, getattr(self, name))
        if self.num_heads < self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads}: must be <= num_heads={self.num_heads}; "
                "several query heads share a KV head, never the reverse"
            )

    @property
    def group_size(self) -> float:
        """Number of query heads per KV head."""
        return self.num_heads / self.num_kv_heads

    @property
    def key_and_value_dim(self) -> int:
        return self.head_dim + (self.head_dim if self.v_head_dim is None else self.v_head_dim)

    @property
    def kv_bytes_per_token(self) -> float:
        return self.num_kv_heads * self.key_and_value_dim * self.kv_bytes_per_element

    @property
    def flops_per_pair(self) -> float:
        """FLOPs per query and key token, all heads: 4 heads head_dim for keys and values of equal width."""
        return 2.0 * self.num_heads * self.key_and_value_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCurve:
    """Performance of tuned attention kernels on one device.

    Defaults are medians over A100, H100, H200, B200 and RTX PRO 6000, with the kernels of an H100.
    """

    compute_capability: str = "sm90"
    """Compute capability, which decides the kernels: sm80, sm89, sm90, sm100, or sm120."""
    decode_start_s: float = 9.5e-6
    """Seconds of a call with few short sequences: launch, start and drain."""
    decode_item_s: float = 3.65e-6
    """Seconds of one KV head (128 wide, bf16) of one sequence on one SM, its context within a tile."""
    kv_bandwidth_share: float = 0.82
    """Share of the data sheet's bandwidth that streaming keys and values of long contexts reaches."""
    prefill_start_s: float = 10e-6
    """Seconds of a call with one short prompt."""
    flops_share: float = 0.9
    """Share of the peak that the multiplications reach; exponentials are counted separately."""
    tile_s: float = 6.4e-6
    """Seconds of one tile of 128 queries, of one head 128 wide, on one SM, besides its useful pairs."""

    def __post_init__(self) -> None:
        known = sorted({capability for _, capability in KERNELS})
        check_curve(self, capabilities=known, most_share=inf)


def kernels_of(library: str, curve: AttentionCurve) -> Kernels:
    """Returns the kernels that the library runs on such a chip. Raises ValueError for an unknown library."""
    if (library, curve.compute_capability) in KERNELS:
        return KERNELS[library, curve.compute_capability]
    known = sorted({name for name, _ in KERNELS} - CHOICES.keys())
    if library not in known and library not in CHOICES:
        raise ValueError(f"kernels={library}: must be one of {', '.join(known)}")
    able = sorted(capability for name, capability in KERNELS if name == library)
    raise ValueError(
        f"attention_kernels={library}: runs on {', '.join(able)} only, not on "
        f"{curve.compute_capability}; choose flash_attention_2 or flash_decoding"
    )


class DecodeAttention:
    """Decode attention of one layer; everything independent of the batch is computed once.

    rows: query rows of each sequence, its draft tokens included. Several also have the time of their pairs,
    at the rate of prefill: on an H100 with defaults, 32 query and 8 KV heads of 128, 64 sequences with 4,096
    tokens and 5 rows each take the 391 us of a decode for 1.075e9 bytes, and beside them 31 us for 1.31e6
    pairs.
    """

    def __init__(
        self,
        heads: HeadLayout,
        device: Device,
        curve: AttentionCurve,
        kernels: str = "vllm",
        rows: int = 1,
        compute_dtype: str = "bf16",
    ) -> None:
        """Raises ValueError for an unknown library of kernels, or as `PrefillAttention` does for a dtype."""
        chosen = kernels_of(kernels, curve)
        call = chosen.decode if heads.kv_bytes_per_element >= 2 else chosen.decode_fp8
        splits = rows == 1 or not call.single_row
        packed = splits and heads.group_size <= call.max_group_size
        packed = packed and (call.packs_windows or not heads.windowed)
        alone = rows == 1 and (heads.group_size == 1 or not packed)
        item = call.single if alone and call.single is not None else call

        width = heads.key_and_value_dim / 256
        item_s = curve.decode_item_s * item.item * (item.fixed_share + (1 - item.fixed_share) * width)
        rows_per_pass = rows * (heads.group_size if packed else 1.0)
        if packed:
            item_s *= 1 + item.group_share * (min(ceil(rows_per_pass / 8), 4) - 1)
        if heads.windowed:
            item_s *= item.window_tiles
        tiles = ceil(rows_per_pass / TILE_QUERIES)
        self._item_s = item_s
        self._items_per_sm = tiles * (heads.num_kv_heads if packed else heads.num_heads) / device.num_sms
        self._parts_per_sm = self._items_per_sm * (item.max_splits if splits else 1.0)

        share = min(1.0, curve.kv_bandwidth_share * item.bandwidth)
        heads_per_pass = 1.0 if packed else heads.group_size
        passes = max(1.0, tiles * heads_per_pass / L2_OVER_MEMORY)
        token_s = passes * heads.kv_bytes_per_token / (device.memory_bandwidth_bytes_per_s * share)
        # Elements that are converted; fp8 elements take a byte each.
        converted = heads.num_kv_heads * heads.key_and_value_dim * (1.0 if packed else heads.group_size)
        if item.sm_bytes_per_s is not None:
            token_s = max(token_s, converted / (item.sm_bytes_per_s * device.num_sms))
        if heads.kv_bytes_per_element < 1 and "fp32" in device.peak_flops_per_s:
            operations_per_s = device.peak_flops_per_s["fp32"] / 2  # a multiply-add is one
            token_s = max(token_s, UNPACK_OPERATIONS * converted / operations_per_s)
        self._token_s = token_s

        self._start_s = curve.decode_start_s * call.start
        gathers = packed and rows == 1 and heads.group_size > 1 and heads.num_kv_heads > 1
        self._gather_s = call.gather_s if gathers else 0.0
        self._merge_s = item.merge_s
        self._window_merge_s = item.window_merge_s
        self._windowed = heads.windowed
        self._overlap = item.overlap
        self._pair_s = 0.0
        if rows > 1:
            self._pair_s = PrefillAttention(heads, device, curve, kernels, compute_dtype).pair_s
        self.beside_prefill = call.beside_prefill
        """Factor on the time of decodes in an iteration that also prefills (1: no slowdown)."""

    def lines(self, num_seqs: Any) -> Lines:
        """Returns lines (seconds, per KV token, per query-key pair, per row); the largest is the time."""
        some = smaller(num_seqs, 1.0)  # 0 sequences: 0 seconds
        waves = self._items_per_sm * num_seqs
        # The first wave is part of the start; on average half a wave more than the last one fills.
        items_s = self._item_s * larger(waves - 0.5, 0.0)
        start_s = self._start_s * some
        if self._gather_s:
            start_s = start_s + self._gather_s * smaller(larger(num_seqs - 1.0, 0.0), 1.0)
        merged_s = start_s + self._merge_s * some
        whole_s = start_s + items_s
        if self._windowed:
            whole_s = larger(merged_s + items_s, merged_s + self._window_merge_s * smaller(waves, 1.0))
        token_s = self._token_s / self.busy_share(num_seqs)
        of_keys = (
            (whole_s, 0.0, 0.0, 0.0),
            (merged_s, token_s, 0.0, 0.0),
            (merged_s + self._overlap * items_s, self._overlap * token_s, 0.0, 0.0),
        )
        if not self._pair_s:
            return of_keys
        return (*of_keys, (merged_s, 0.0, self._pair_s / self.busy_share(num_seqs), 0.0))

    def busy_share(self, num_seqs: Any) -> Any:
        """Returns the share of the SMs that have a part of a context."""
        return smaller(self._parts_per_sm * larger(num_seqs, 1.0), 1.0)

    def seconds(self, num_seqs: Any, context_tokens: Any) -> Any:
        """Returns seconds of num_seqs sequences with context_tokens in total, new tokens included."""
        return highest(self.lines(num_seqs), context_tokens, context_tokens, num_seqs)


class PrefillAttention:
    """Prefill attention of one layer; everything independent of the batch is computed once."""

    def __init__(
        self,
        heads: HeadLayout,
        device: Device,
        curve: AttentionCurve,
        kernels: str = "vllm",
        compute_dtype: str = "bf16",
    ) -> None:
        """Chooses the kernels; fp8 kernels run if compute_dtype is fp8, or if keys and values are.

        Raises ValueError for an unknown library of kernels, or a dtype that the device does not compute in.
        """
        chosen = kernels_of(kernels, curve)
        fp8 = compute_dtype == "fp8" or heads.kv_bytes_per_element < 2
        family = chosen.prefill_fp8 if fp8 else chosen.prefill
        # The gain of fp8 arithmetic is in the family's factor, relative to the peak of bf16.
        peak = device.peak_flops_per_s[
            device.compute_dtype("bf16" if compute_dtype == "fp8" else compute_dtype)
        ]
        share = curve.flops_share * family.flops
        pair_s = 2.0 * heads.key_and_value_dim / (peak * share) + 1 / (device.num_sms * EXPONENTIALS_PER_SM_S)
        pair_s += family.score_bytes / (device.memory_bandwidth_bytes_per_s * curve.kv_bandwidth_share)
        self._skips_masked = family.skips_masked
        self.pair_s = heads.num_heads * pair_s
        """Seconds of a query-key pair, all heads, with all SMs busy."""
        self._key_s = family.chain * TILE_QUERIES * device.num_sms * pair_s

        width = heads.key_and_value_dim / 256
        tile_s = (
            curve.tile_s * family.tile * (family.tile_fixed_share + (1 - family.tile_fixed_share) * width)
        )
        tiles_s = heads.num_heads * tile_s / device.num_sms
        self._seq_s = family.part_tile * tiles_s

        bandwidth = device.memory_bandwidth_bytes_per_s * curve.kv_bandwidth_share
        moved_s = family.kv_passes * 2.0 * heads.num_kv_heads * heads.key_and_value_dim / bandwidth
        self._context_s = heads.kv_bytes_per_token / bandwidth
        # The context includes the new tokens; their passes are counted already.
        self._token_s = tiles_s / TILE_QUERIES + moved_s - self._context_s
        if heads.windowed:
            self._token_s += family.window_keys * self.pair_s
        self._start_s = curve.prefill_start_s * family.start

    def seconds(self, num_seqs: Any, new_tokens: Any, pairs: Any, context_tokens: Any) -> Any:
        """Returns seconds of num_seqs chunks; new tokens, causal pairs, cached + new tokens are sums."""
        are_many = ndarray in (type(num_seqs), type(new_tokens), type(pairs), type(context_tokens))
        smallest: Any = np.minimum if are_many else min
        largest: Any = np.maximum if are_many else max
        some = smallest(num_seqs, 1.0)  # 0 chunks: 0 seconds
        if not self._skips_masked:
            pairs = new_tokens * context_tokens / (num_seqs + 1.0 - some)
        # Keys of the last tile: the context, or with a window twice what a query sees on average.
        last_keys = smallest(context_tokens / (num_seqs + 1.0 - some), 2.0 * pairs / largest(new_tokens, 1.0))
        chain_s = self._key_s * last_keys
        work_s = (
            self._seq_s * num_seqs
            + self._token_s * new_tokens
            + self._context_s * context_tokens
            + self.pair_s * pairs
        )
        return self._start_s * some + largest(work_s + 0.5 * chain_s, chain_s)
