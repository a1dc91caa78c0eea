"""Multi-head latent attention (MLA: DeepSeek-V2, 2024, section 2.1), without its projections.

Times are seconds of one call (one layer) on one device. h heads; widths: r latent (kv_lora_rank), R its rope
part, d a head's nope part, v a head's value; b bytes per cached element.

Decode is absorbed: queries are projected into the latent space, and all heads attend to the one cached vector
of each context token, which is read once. n sequences, c context tokens of all of them:

    t = start + n (item start / SMs + passes 2 h (2 r + R) / B0) + c max((r + R) b / B, 2 h' (2 r + R) / F)

    B and F are shares of the device: with few sequences, the share of the SMs with a part of a context.

    item a sequence occupies one SM for this time, apart from its context; here and below relative to `start`:
    latency-bound work scales like the start of a kernel
    passes over queries and outputs, 2 bytes per element, at the data-sheet bandwidth B0
    B, F     bandwidth and FLOP/s reached; h' heads, padded to a tile

Draft tokens that a pass verifies are additional query rows: n + x rows have queries and outputs, a sequence's
rows share one read of its vectors and a tile of heads, and every row-vector pair is multiplied.

Kernels that do not split contexts over SMs take at least start + n (...) + c/n token_s, c/n the mean context.

Prefill is naive: keys and values of all heads are first expanded (by a GEMM priced elsewhere), then attended
to. s sequences, x new tokens of all of them:

    t = start' + max(s h item' start / SMs + x passes' 4 h (d + R + v) / B0 + pairs 2 h (d + R + v) / F',
                     the last tile of 128 queries of the mean sequence, alone on its SM)

A simulator prices leaps of iterations as arrays: only `+ - * / abs` are applied to varying values (see
`hwmodels.exact`). Measured: TensorRT-LLM 1.0 and 1.3, vLLM 0.14 and 0.24, A100 to B200 (NVIDIA
aiconfigurator).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hwmodels.checks import check_curve, check_finite, check_whole
from hwmodels.device import Device
from hwmodels.exact import Lines, highest, larger, smaller

TILE = 128
"""Queries of one tile of prefill attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaHeads:
    """Heads of one rank, and their widths; defaults: DeepSeek-V2 and V3."""

    num_heads: int
    kv_lora_rank: int = 512
    rope_head_dim: int = 64
    nope_head_dim: int = 128
    v_head_dim: int = 128
    kv_bytes_per_element: float = 2.0

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "nope_head_dim", "v_head_dim"):
            check_whole(name, getattr(self, name))
        if self.rope_head_dim != 0:  # there may be none
            check_whole("rope_head_dim", self.rope_head_dim)
        check_finite("kv_bytes_per_element", self.kv_bytes_per_element, unit="bytes")

    @property
    def latent_bytes_per_token(self) -> float:
        """Bytes cached per token and layer; DeepSeek-V3 in bf16: (512 + 64) x 2 = 1,152 bytes."""
        return (self.kv_lora_rank + self.rope_head_dim) * self.kv_bytes_per_element

    @property
    def decode_flops_per_token(self) -> float:
        """FLOPs per query and context token: 2 h ((r + R) + r); DeepSeek-V3, 128 heads: 278,528."""
        return 2.0 * self.num_heads * (2 * self.kv_lora_rank + self.rope_head_dim)

    @property
    def prefill_flops_per_pair(self) -> float:
        """FLOPs per query and key with its value: 2 h (d + R + v); DeepSeek-V3, 128 heads: 81,920."""
        return 2.0 * self.num_heads * (self.nope_head_dim + self.rope_head_dim + self.v_head_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaCurve:
    """Performance of MLA kernels on one device. Defaults are medians over A100 to RTX PRO 6000."""

    compute_capability: str = "sm90"
    """Compute capability, which decides the kernels: sm80, sm89, sm90, sm100, or sm120."""
    start_s: float = 13e-6
    """Start of decode: launch, split and merge. 9 us (RTX PRO 6000) to 14 us (H200)."""
    bandwidth_share: float = 0.76
    """Share of the data-sheet bandwidth in decode, reading latent vectors. 0.75 (B200) to 0.91 (H100, H200).
    """
    flops_share: float = 0.60
    """Share of the data-sheet FLOP/s in decode, multiplying with latent vectors. 0.26 (A100) to 0.72 (H200).
    """

    def __post_init__(self) -> None:
        check_curve(self, capabilities=FAMILIES)


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaKernels:
    """Differences of one kernel family from the others, equal on every device."""

    item: float
    """Decode: time of one sequence on one SM, apart from its context, relative to the curve's start_s."""
    query_passes: float
    """Decode: number of moves of queries and outputs, including partial outputs of split contexts."""
    head_tile: int = 64
    """Decode: heads are padded to a multiple of this."""
    flops: float = 1.0
    """Decode: factor on the curve's flops_share."""
    max_splits: float = 1e9
    """Decode: maximum number of SMs per context; with fewer sequences than SMs / max_splits, some SMs idle.
    """
    token: float = 0.0
    """Decode: one context token on one SM, 2 bytes per element, relative to start_s; 0: contexts are split.
    """
    prefill_start: float
    """Prefill: start relative to the curve's start_s."""
    prefill_item: float
    """Prefill: one sequence and head on one SM, apart from its pairs, relative to start_s."""
    prefill_passes: float
    """Prefill: number of moves of queries, keys, values and outputs."""
    prefill_flops_share: float
    """Prefill: share of the data-sheet peak, equal on all devices."""
    fp8_with_cache: bool = False
    """Prefill computes in fp8 if the cache is in fp8."""
    fp8_passes: float = 0.0
    """Prefill in fp8: additional moves (as prefill_passes) for quantising."""
    fp8_flops: float = 1.0
    """Prefill in fp8: speed over bf16. Exponentials and conversions are not faster."""


FAST_KERNELS = {
    "vllm": MlaKernels(
        item=0.38,
        query_passes=6.7,
        max_splits=64,
        prefill_start=1.5,
        prefill_item=0.03,
        prefill_passes=3.0,
        prefill_flops_share=0.78,
    ),
    "trtllm": MlaKernels(
        item=0.25,
        query_passes=2.5,
        max_splits=64,
        prefill_start=1.35,
        prefill_item=0.22,
        prefill_passes=1.0,
        prefill_flops_share=0.55,
        fp8_with_cache=True,
        fp8_passes=1.4,
        fp8_flops=1.22,
    ),
}
"""Kernels by library. vLLM: FlashMLA, FlashAttention-3, FlashInfer. TensorRT-LLM: its own."""

PORTABLE_KERNELS = {
    "vllm": MlaKernels(
        item=0.01,
        query_passes=4.0,
        head_tile=16,
        flops=0.33,
        prefill_start=1.0,
        prefill_item=0.01,
        prefill_passes=3.1,
        prefill_flops_share=0.64,
    ),
    "vllm_0.14": MlaKernels(
        item=0.01,
        query_passes=25.0,
        head_tile=16,
        flops=0.37,
        token=2.1e-3,
        prefill_start=1.0,
        prefill_item=0.04,
        prefill_passes=6.3,
        prefill_flops_share=0.55,
    ),
    "trtllm": MlaKernels(
        item=0.75,
        query_passes=0.62,
        token=9e-3,
        prefill_start=1.14,
        prefill_item=0.26,
        prefill_passes=1.05,
        prefill_flops_share=0.52,
        fp8_with_cache=True,
        fp8_passes=0.7,
        fp8_flops=1.75,
    ),
}
"""Kernels by library. vLLM: Triton, FlashAttention-2; 0.14 cut contexts into 4. TensorRT-LLM: generic."""

FAMILIES = {
    "sm80": PORTABLE_KERNELS,
    "sm89": PORTABLE_KERNELS,
    "sm90": FAST_KERNELS,
    "sm100": FAST_KERNELS,
    "sm120": PORTABLE_KERNELS,
}
"""Kernels by compute capability, then library.

Dedicated MLA kernels need the tensor cores of Hopper's and Blackwell's server chips.
"""


class MlaDecode:
    """Absorbed decode of one layer; everything independent of the batch is computed once.

    H100, default curve, TensorRT-LLM, 128 heads, 64 sequences with 4,096 tokens each in bf16:
    13 us + 64 x (25 ns + 208 ns) + 262,144 x max(0.452 ns, 0.469 ns) = 150.9 us. Measured: 139.4 us.
    """

    __slots__ = (
        "_busy_share",
        "_item_s",
        "_key_s",
        "_pair_s",
        "_row_s",
        "_rows",
        "_start_s",
        "_token_s",
    )

    def __init__(
        self, heads: MlaHeads, device: Device, curve: MlaCurve, kernels: str = "vllm", rows: int = 1
    ) -> None:
        """Builds it for sequences with this many query rows each, including draft tokens."""
        family = kernels_of(kernels, curve)
        bandwidth = device.memory_bandwidth_bytes_per_s
        query_bytes = heads.num_heads * (2 * heads.kv_lora_rank + heads.rope_head_dim) * 2.0
        tiled = heads.num_heads * rows
        padded = -(-tiled // family.head_tile) * family.head_tile / tiled
        self._rows = rows
        self._start_s = curve.start_s
        self._busy_share = family.max_splits / device.num_sms
        self._item_s = family.item * curve.start_s / device.num_sms
        self._row_s = family.query_passes * query_bytes / bandwidth
        self._key_s = heads.latent_bytes_per_token / (bandwidth * curve.bandwidth_share)
        self._pair_s = (
            heads.decode_flops_per_token
            * padded
            / (decode_peak_flops_per_s(heads, device, curve) * curve.flops_share * family.flops)
        )
        # Half of it is for reading and converting elements, the other half is per token.
        self._token_s = family.token * curve.start_s * (1 + heads.kv_bytes_per_element / 2) / 2

    def lines(self, num_seqs: Any) -> Lines:
        """Returns lines (seconds, per KV token, per query-key pair, per row); the largest is the time."""
        started_s, busy = self._start_s * smaller(num_seqs, 1.0), self._busy(num_seqs)
        if self._rows == 1:  # as many pairs as keys, and as many rows as sequences
            fixed_s, row_s = started_s + (self._item_s + self._row_s) * num_seqs, 0.0
            lines = [(fixed_s, max(self._key_s, self._pair_s) / busy, 0.0, row_s)]
        else:
            fixed_s, row_s = started_s + self._item_s * num_seqs, self._row_s
            lines = [(fixed_s, self._key_s / busy, 0.0, row_s), (fixed_s, 0.0, self._pair_s / busy, row_s)]
        if self._token_s:
            lines.append((fixed_s, self._token_s / larger(num_seqs, 1.0), 0.0, row_s))
        return tuple(lines)

    def _busy(self, num_seqs: Any) -> Any:
        """Returns the share of the SMs with a part of a context."""
        return smaller(self._busy_share * larger(num_seqs, 1.0), 1.0)

    def seconds(self, num_seqs: Any, context_tokens: Any) -> Any:
        """Returns seconds; context_tokens: of all sequences, new ones included. 0 sequences take 0 s."""
        return highest(self.lines(num_seqs), context_tokens, context_tokens, num_seqs)


class MlaPrefill:
    """Naive prefill of one layer; everything independent of the batch is computed once.

    H100, default curve, TensorRT-LLM, 128 heads, one prompt of 4,096 tokens in bf16:
    17.6 us + 2.8 us + 4,096 x 48.9 ns + 8,390,656 x 0.1505 ns = 1,484 us. Measured: 1,263 us.
    """

    __slots__ = ("_chain_s", "_pair_s", "_seq_s", "_start_s", "_token_s")

    def __init__(
        self,
        heads: MlaHeads,
        device: Device,
        curve: MlaCurve,
        kernels: str = "vllm",
        compute_dtype: str = "bf16",
    ) -> None:
        family = kernels_of(kernels, curve)
        fp8 = compute_dtype == "fp8" or (family.fp8_with_cache and heads.kv_bytes_per_element < 2)
        fp8 = fp8 and "fp8" in device.peak_flops_per_s
        dims = 2 * (heads.nope_head_dim + heads.rope_head_dim) + 2 * heads.v_head_dim
        passes = family.prefill_passes + (family.fp8_passes if fp8 else 0.0)
        flops_per_s = peak_flops_per_s(device) * family.prefill_flops_share
        self._start_s = curve.start_s * family.prefill_start
        self._seq_s = heads.num_heads * family.prefill_item * curve.start_s / device.num_sms
        self._token_s = passes * heads.num_heads * dims * 2.0 / device.memory_bandwidth_bytes_per_s
        self._pair_s = heads.prefill_flops_per_pair / (flops_per_s * (family.fp8_flops if fp8 else 1.0))
        self._chain_s = TILE * device.num_sms * self._pair_s / heads.num_heads

    def seconds(self, num_seqs: Any, new_tokens: Any, pairs: Any, context_tokens: Any) -> Any:
        """Returns seconds; pairs: causal pairs; context_tokens: cached and new. 0 sequences take 0 s."""
        work_s = self._seq_s * num_seqs + self._token_s * new_tokens + self._pair_s * pairs
        chain_s = self._chain_s * (context_tokens / larger(num_seqs, 1.0))
        return self._start_s * smaller(num_seqs, 1.0) + larger(work_s, chain_s)


def kernels_of(kernels: str, curve: MlaCurve) -> MlaKernels:
    """Returns the family that an engine runs on such a chip. Raises ValueError for an unknown library."""
    families = FAMILIES[curve.compute_capability]
    if kernels not in families:
        raise ValueError(f"kernels={kernels}: must be one of {', '.join(families)}")
    return families[kernels]


def peak_flops_per_s(device: Device) -> float:
    """Returns the peak FLOP/s for 16-bit activations; chips before Ampere have no bf16."""
    return device.peak_flops_per_s[device.compute_dtype("bf16")]


def decode_peak_flops_per_s(heads: MlaHeads, device: Device, curve: MlaCurve) -> float:
    """Returns the peak FLOP/s of decode: sm100 kernels multiply 1-byte latents in fp8, others in bf16."""
    in_fp8 = heads.kv_bytes_per_element <= 1 and curve.compute_capability == "sm100"
    if in_fp8 and "fp8" in device.peak_flops_per_s:
        return device.peak_flops_per_s["fp8"]
    return peak_flops_per_s(device)
