"""Fits the curve of MLA attention on one device to measured rows, and predicts rows.

Columns: framework (vllm, trtllm), version, scope, phase (decode, prefill), mla_dtype, kv_dtype, gemm_type,
num_heads, batch_size, seq_len (new tokens per sequence), kv_len (cached and new tokens), latency_us.

scope `kernel`: only the attention. scope `module`: everything in DeepSeek-V3 between two residual additions:

    both      qkv_a_proj (7168 to 1536 + 512 + 64), norms of queries and latents, q_b_proj (1536 to h 192),
              rotary embedding, cache write
    decode    W_UK of each head (128 to 512, bf16), absorbed attention, W_UV of each head (512 to 128, bf16)
    prefill   kv_b_proj (512 to h 256), attention over expanded heads
    both      o_proj (h 128 to 7168)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwmodels.device import Device
from hwmodels.fitting.robust import Fitted, Floats, fit_curve
from hwmodels.model.weights import KV_BYTES, WeightFormat, weight_format
from hwmodels.operators.gemm import GemmCurve, StreamCurve, gemm_seconds, stream_seconds
from hwmodels.operators.mla import (
    FAMILIES,
    MlaCurve,
    MlaDecode,
    MlaHeads,
    MlaPrefill,
)

Rows = Mapping[str, Any]

GROUP_BY = ("num_heads",)

HIDDEN_SIZE = 7168
Q_LORA_RANK = 1536
BF16 = weight_format("bf16")

DTYPES = {"bfloat16": "bf16"}
"""Dtype by name in the rows, where names differ."""

RANGES = {"start_s": (2e-6, 50e-6), "bandwidth_share": (0.1, 1.0), "flops_share": (0.1, 1.0)}
"""Fitted parameters of `MlaCurve`, with their bounds."""

HOST_S = {"decode": 330e-6, "prefill": 270e-6}
"""Host time of vLLM 0.14 (A100), which was timed outside CUDA graphs: no row is faster than its launches."""


class Elementwise(NamedTuple):
    """Kernels of a module that are neither GEMM nor attention."""

    kernels: int
    latent_passes: float
    """Passes over compressed queries and latents, 2 bytes per element."""


FUSED = Elementwise(kernels=1, latent_passes=2.0)
CHAINED = Elementwise(kernels=28, latent_passes=20.0)
CHAINED_PORTABLE = Elementwise(kernels=12, latent_passes=12.0)
"""Norms and rotary embedding as chains of small fp32 kernels, which the compiler of an engine would fuse.

vLLM's modules were timed this way on every chip but one; it adds 30 to 60 us to batches of any size.
"""
VLLM_ELEMENTWISE = {
    "sm80": CHAINED_PORTABLE,
    "sm89": CHAINED_PORTABLE,
    "sm90": CHAINED,
    "sm100": CHAINED,
    "sm120": CHAINED_PORTABLE,
}
"""Elementwise kernels of vLLM's modules by compute capability."""

COMPILED_MODULES = ("B200 SXM",)
"""Devices on which vLLM's modules were timed with the compiler's fusion, as short as TensorRT-LLM's. This is
a property of this one benchmark, not of the chip: B300 and GB200 are expected to have chains. Small modules
of H100, H200 and RTX PRO 6000 take twice as long as TensorRT-LLM's on the same chip.
"""


class Attention(NamedTuple):
    """Columns with the same values in all rows of a group."""

    framework: str
    version: str
    scope: str
    phase: str
    mla_dtype: str
    kv_dtype: str
    gemm_type: str
    num_heads: int

    def kernels(self, compute_capability: str) -> str:
        """Returns the library name in `operators.mla.FAMILIES`.

        Old versions have different portable kernels.
        """
        old = "vllm_0.14" if self.outside_graphs else self.framework
        return old if old in FAMILIES[compute_capability] else self.framework

    @property
    def outside_graphs(self) -> bool:
        return self.framework == "vllm" and self.version.startswith("0.14")

    @property
    def heads(self) -> MlaHeads:
        kv_bytes = KV_BYTES[DTYPES.get(self.kv_dtype, self.kv_dtype)]
        return MlaHeads(num_heads=int(self.num_heads), kv_bytes_per_element=kv_bytes)


def predict_mla(
    rows: Rows,
    device: Device,
    curve: MlaCurve,
    gemm: GemmCurve | None = None,
    stream: StreamCurve | None = None,
) -> Floats:
    """Returns seconds of each row on that device; gemm and stream price a module's other operators."""
    return prices(rows, device, curve.compute_capability, gemm, stream)(curve)


def fit_mla(
    rows: Rows,
    device: Device,
    gemm: GemmCurve | None = None,
    stream: StreamCurve | None = None,
    *,
    compute_capability: str,
    seed: int = 0,
) -> Fitted[MlaCurve]:
    """Returns the curve fitted to the rows of one device, kernels and modules together."""
    return fit_curve(
        MlaCurve(compute_capability=compute_capability),
        RANGES,
        prices(rows, device, compute_capability, gemm, stream),
        np.asarray(rows["latency_us"], dtype=np.float64) * 1e-6,
        seed=seed,
    )


def prices(
    rows: Rows,
    device: Device,
    compute_capability: str,
    gemm: GemmCurve | None = None,
    stream: StreamCurve | None = None,
) -> Callable[[MlaCurve], Floats]:
    """Returns the seconds of each row as a function of a curve of that compute capability.

    A module's other kernels are added to the attention. No row outside CUDA graphs takes less than the host
    time.
    """
    num_seqs, new_tokens, kv_len = lengths(rows)
    rest_s, least_s = np.zeros_like(num_seqs), np.zeros_like(num_seqs)
    parts = list(groups(rows))
    for group, chosen in parts:
        if group.scope == "module":
            num_tokens = (num_seqs * new_tokens)[chosen]
            rest_s[chosen] = projection_seconds(group, num_tokens, device, gemm or GemmCurve())
            rest_s[chosen] += elementwise_seconds(
                group, num_tokens, device, stream or StreamCurve(), compute_capability
            )
        if group.outside_graphs:
            least_s[chosen] = HOST_S[group.phase]

    def price(curve: MlaCurve) -> Floats:
        seconds = rest_s.copy()
        for group, chosen in parts:
            shape = num_seqs[chosen], new_tokens[chosen], kv_len[chosen]
            seconds[chosen] += attention_seconds(group, *shape, device, curve)
        return np.maximum(seconds, least_s)

    return price


def lengths(rows: Rows) -> tuple[Floats, Floats, Floats]:
    """Returns per row: sequences, new tokens per sequence, cached and new tokens per sequence."""
    num_seqs, new_tokens, kv_len = (
        np.asarray(rows[name], dtype=np.float64) for name in ("batch_size", "seq_len", "kv_len")
    )
    return num_seqs, new_tokens, kv_len


def groups(rows: Rows) -> Iterator[tuple[Attention, NDArray[np.intp]]]:
    """Yields groups of rows that differ only in their lengths, with their indices."""
    members: dict[Attention, list[int]] = {}
    columns = (rows[name] for name in Attention._fields)
    for index, values in enumerate(zip(*columns, strict=True)):
        group = Attention(*values)
        if group.scope == "kernel":
            group = group._replace(gemm_type="")  # rows of kernels hold NaN, unequal to itself
        members.setdefault(group, []).append(index)
    for group, indices in members.items():
        yield group, np.array(indices, dtype=np.intp)


def attention_seconds(
    group: Attention, num_seqs: Floats, new_tokens: Floats, kv_len: Floats, device: Device, curve: MlaCurve
) -> Floats:
    """Prices the attention of rows that run the same kernels, in seconds."""
    kernels, heads, context = group.kernels(curve.compute_capability), group.heads, num_seqs * kv_len
    seconds: Any
    if group.phase == "decode":
        seconds = MlaDecode(heads, device, curve, kernels).seconds(num_seqs, context)
    else:
        pairs = num_seqs * new_tokens * (kv_len - new_tokens + (new_tokens + 1) / 2)
        prefill = MlaPrefill(heads, device, curve, kernels, DTYPES.get(group.mla_dtype, group.mla_dtype))
        seconds = prefill.seconds(num_seqs, num_seqs * new_tokens, pairs, context)
    return np.asarray(seconds, dtype=np.float64)


def projection_seconds(group: Attention, num_tokens: Floats, device: Device, gemm: GemmCurve) -> Floats:
    """Returns the seconds of the module's GEMMs; GEMMs per head are priced as one over all heads."""
    weights = weight_format(DTYPES.get(group.gemm_type, group.gemm_type))
    seconds = np.zeros_like(num_tokens)
    for n, k, stored in projections(group.heads, weights, absorbed=group.phase == "decode"):
        seconds = seconds + gemm_seconds(
            num_tokens, n, k, stored, device, gemm, dtype="bf16", kernels=group.framework
        )
    return seconds


def projections(
    heads: MlaHeads, weights: WeightFormat, *, absorbed: bool
) -> list[tuple[int, int, WeightFormat]]:
    """Returns (outputs, inputs, weight format) of each projection."""
    h, latent = heads.num_heads, heads.kv_lora_rank
    shapes = [
        (Q_LORA_RANK + latent + heads.rope_head_dim, HIDDEN_SIZE, weights),
        (h * (heads.nope_head_dim + heads.rope_head_dim), Q_LORA_RANK, weights),
        (HIDDEN_SIZE, h * heads.v_head_dim, weights),
    ]
    if absorbed:
        return [*shapes, (h * latent, heads.nope_head_dim, BF16), (h * heads.v_head_dim, latent, BF16)]
    return [*shapes, (h * (heads.nope_head_dim + heads.v_head_dim), latent, weights)]


def elementwise_seconds(
    group: Attention, num_tokens: Floats, device: Device, stream: StreamCurve, compute_capability: str
) -> Floats:
    """Prices the norms, rotations and cache writes next to the GEMMs, in seconds."""
    chained = group.framework == "vllm" and device.name not in COMPILED_MODULES
    work = VLLM_ELEMENTWISE[compute_capability] if chained else FUSED
    heads = group.heads
    width = Q_LORA_RANK + heads.kv_lora_rank + heads.rope_head_dim
    num_bytes = work.latent_passes * 2.0 * width * num_tokens
    return np.asarray(stream_seconds(num_bytes, device, stream, kernels=work.kernels), dtype=np.float64)
