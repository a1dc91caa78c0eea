"""Weights of a layer: matrices, the ranks over which they are sharded, storage formats, and LoRA adapters.

Every part of a layer lists the matrices that one rank multiplies with, as engines fuse them (Q, K and V in
one, gate and up in one) and as Megatron-LM shards them: the first of a pair by columns, the second by rows
(Shoeybi et al., 2019). Parameters, bytes and FLOPs are all counted from those lists. A share that is not an
integer is rounded up, because engines pad it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from fieldlimits import Checked, PositiveInt
from hwmodels.device import Device


class Role(Enum):
    """The setting of the model that determines how a matrix is stored."""

    dense = "dense"
    """Stored as `weights`: attention, dense MLPs, shared experts."""
    routed = "routed"
    """Stored as `moe_weights`: routed experts."""
    plain = "plain"
    """Stored as `dtype`: router, LM head, embedding table, which quantisers leave unchanged."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` weight matrices with k inputs and n outputs each."""

    name: str
    k: int
    n: int
    count: int = 1
    role: Role = Role.dense
    stored: str | None = None
    """Storage format of this matrix in the checkpoint; None: its role's format."""
    slices: tuple[int, ...] = ()
    """Outputs of each projection that the matrix fuses, such as q, k and v; empty: it is one projection."""

    @property
    def elements(self) -> int:
        return self.k * self.n * self.count


class Ranks(NamedTuple):
    """Numbers of ranks over which the parts of a layer are sharded."""

    tensor: int = 1
    """Ranks for attention, dense MLPs, shared experts, vocabulary."""
    moe_tensor: int = 1
    """Ranks that share each routed expert."""
    expert: int = 1
    """Ranks over which the routed experts are distributed."""


ONE_RANK = Ranks()


def share_of(size: int, num_ranks: int) -> int:
    """Divides a size among ranks, rounded up: the largest share."""
    return -(-size // num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """A storage format of the weights of matrices."""

    name: str
    bits: float
    """Bits per weight, without scales."""
    scale_bytes_per_weight: float = 0.0
    """Bytes of scales and zero points per weight."""
    compute: str | None = None
    """dtype of the matrix multiplication (`devices.device.DTYPE_BYTES`); None: the activations' dtype."""
    stand_in: str | None = None
    """Compute dtype on chips that lack `compute`; None: the activations' (weights are unpacked first)."""
    group_bytes: float | None = None
    """Bytes of scale and zero point of one group, if NAME_gN sets groups of N weights; None: not supported.
    """
    source: str = ""

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8 + self.scale_bytes_per_weight

    def compute_dtype(self, device: Device, activations: str) -> str:
        """Returns the dtype of the tensor cores: the format's if the chip supports it, else a substitute.

        fp8 on an A100 becomes weight-only: stored in 8 bits, multiplied in the activations' dtype.
        """
        for dtype in (self.compute, self.stand_in):
            if dtype is not None and dtype in device.peak_flops_per_s:
                return dtype
        return device.compute_dtype(activations)

    def falls_back_on(self, device: Device) -> bool:
        """Returns whether the chip lacks the format's compute dtype."""
        return self.compute is not None and self.compute not in device.peak_flops_per_s


WEIGHT_FORMATS = {
    f.name: f
    for f in (
        WeightFormat(name="fp32", bits=32, compute="tf32", stand_in="fp32"),
        WeightFormat(name="bf16", bits=16),
        WeightFormat(name="fp16", bits=16),
        WeightFormat(name="fp8", bits=8, compute="fp8", source="one scale per tensor (or per row)"),
        WeightFormat(
            name="fp8_block",
            bits=8,
            scale_bytes_per_weight=4 / (128 * 128),
            compute="fp8",
            source="an fp32 scale for each 128 x 128 weights and each 1 x 128 activations (DeepSeek-V3)",
        ),
        WeightFormat(name="fp8_wo", bits=8, source="weight-only fp8, one scale per tensor or row"),
        WeightFormat(
            name="mxfp8",
            bits=8,
            scale_bytes_per_weight=1 / 32,
            compute="fp8",
            source="fp8 with an 8-bit exponent for 32 weights and 32 activations (OCP MX)",
        ),
        WeightFormat(name="int8", bits=8, compute="int8", source="W8A8, SmoothQuant: int8 tensor cores"),
        WeightFormat(name="int8_wo", bits=8, group_bytes=3.0, source="weight-only int8, one scale per row"),
        WeightFormat(
            name="int4_wo",
            bits=4,
            scale_bytes_per_weight=2.5 / 128,
            group_bytes=2.5,
            source="weight-only int4 (AWQ, GPTQ): fp16 scale and 4-bit zero point for 128 weights",
        ),
        WeightFormat(
            name="int3_wo",
            bits=3,
            scale_bytes_per_weight=2.375 / 128,
            group_bytes=2.375,
            source="weight-only int3 (GPTQ, HQQ): fp16 scale and 3-bit zero point for 128 weights",
        ),
        WeightFormat(
            name="int2_wo",
            bits=2,
            scale_bytes_per_weight=2.25 / 128,
            group_bytes=2.25,
            source="weight-only int2 (AutoRound, HQQ): fp16 scale and 2-bit zero point for 128 weights",
        ),
        WeightFormat(
            name="ternary",
            bits=2,
            source="weights of -1, 0 and 1, four to a byte, one scale per matrix (BitNet)",
        ),
        WeightFormat(
            name="int4_fp8",
            bits=4,
            scale_bytes_per_weight=2.0 / 128,
            compute="fp8",
            group_bytes=2.0,
            source="W4A8: int4 weights with a scale for 128, activations in fp8 (w4afp8, W4A8_AWQ)",
        ),
        WeightFormat(
            name="int4_int8",
            bits=4,
            scale_bytes_per_weight=2.0 / 128,
            compute="int8",
            group_bytes=2.0,
            source="W4A8: int4 weights with a scale for 128, activations in int8 (QQQ, QoQ)",
        ),
        WeightFormat(
            name="nf4",
            bits=4,
            scale_bytes_per_weight=4 / 64,
            source="bitsandbytes in 4 bits (NF4, FP4): an fp32 scale for 64 weights",
        ),
        WeightFormat(
            name="nf4_double",
            bits=4,
            scale_bytes_per_weight=1 / 64 + 4 / (64 * 256),
            source="nf4 whose scales are in 8 bits, with an fp32 scale for 256 of them (double quantisation)",
        ),
        WeightFormat(
            name="nvfp4",
            bits=4,
            scale_bytes_per_weight=1 / 16,
            compute="fp4",
            stand_in=None,
            source="an fp8 scale for 16 weights; on chips without fp4 weight-only",
        ),
        WeightFormat(
            name="nvfp4_wo",
            bits=4,
            scale_bytes_per_weight=1 / 16,
            source="weights as nvfp4, activations in 16 bits (W4A16_NVFP4)",
        ),
        WeightFormat(
            name="nvfp4_fp8",
            bits=4,
            scale_bytes_per_weight=1 / 16,
            compute="fp8",
            source="weights as nvfp4, activations in fp8 (W4A8_NVFP4_FP8)",
        ),
        WeightFormat(
            name="mxfp4",
            bits=4,
            scale_bytes_per_weight=1 / 32,
            source="an 8-bit exponent for 32 weights (OCP MX); activations stay in bf16 (W4A16)",
        ),
        WeightFormat(
            name="mxfp4_mxfp8",
            bits=4,
            scale_bytes_per_weight=1 / 32,
            compute="fp8",
            source="weights as mxfp4, activations in fp8 with such exponents (W4A8): gpt-oss on Blackwell",
        ),
        WeightFormat(
            name="mxfp4_mxfp4",
            bits=4,
            scale_bytes_per_weight=1 / 32,
            compute="fp4",
            source="weights and activations as mxfp4 (W4A4): Quark on MI355X",
        ),
        WeightFormat(
            name="mxfp6",
            bits=6,
            scale_bytes_per_weight=1 / 32,
            source="6 bits, an 8-bit exponent for 32 weights",
        ),
    )
}
"""Storage formats by name. A weight format of None is the model's own dtype."""

KV_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "nvfp4": 0.5 + 1 / 16,
}
"""Bytes of one element of the KV cache; int8 and int4 add a scale per head and token: `KV_SCALE_BYTES`.

nvfp4 has an fp8 scale for 16 elements.
"""

KV_SCALE_BYTES = {"int8": 2.0, "int4": 4.0}
"""Bytes of the fp16 scale (and zero point) of each head's key or value of a token (KIVI, vLLM)."""

SCALE_BYTES = 2.0
"""Bytes of the 16-bit scale of a group without a zero point."""

_GROUPED = re.compile(r"(?P<base>\w+)_(?P<kind>[gs])(?P<size>[1-9]\d{0,4})")


@lru_cache
def weight_format(name: str) -> WeightFormat:
    """Returns the format with this name; int4_wo_g32 is int4_wo with groups of 32 weights.

    int4_wo_s32 is the same with a scale for each group and no zero point, as of symmetric weights.
    Raises ValueError if it is unknown.
    """
    if name in WEIGHT_FORMATS:
        return WEIGHT_FORMATS[name]
    found = _GROUPED.fullmatch(name)
    base = WEIGHT_FORMATS.get(found["base"]) if found else None
    if found is None or base is None or base.group_bytes is None:
        grouped = [one.name for one in WEIGHT_FORMATS.values() if one.group_bytes is not None]
        raise ValueError(
            f"weights={name}: must be one of {', '.join(WEIGHT_FORMATS)}; {', '.join(grouped)} may end in "
            "the size of their groups, such as int4_wo_g32"
        )
    group_bytes = base.group_bytes if found["kind"] == "g" else SCALE_BYTES
    return replace(base, name=name, scale_bytes_per_weight=group_bytes / int(found["size"]))


def kind_of(name: str) -> str:
    """Returns the name of a format without the size of its groups: int4_wo for int4_wo_g32."""
    found = _GROUPED.fullmatch(name)
    return found["base"] if found else name


def in_groups(name: str, size: int | None, *, symmetric: bool = False) -> str:
    """Returns the name of a format with groups of this size; None: the format's default.

    Groups of 128 have no separate name, because zero points of symmetric weights would be 0.4 % of the bytes.
    """
    base = WEIGHT_FORMATS[name]
    if size is None or base.group_bytes is None:
        return name
    is_usual = base.scale_bytes_per_weight == base.group_bytes / size
    return name if is_usual else f"{name}_{'s' if symmetric else 'g'}{size}"


def check_weight_format(name: str, given: str) -> None:
    """Raises ValueError that names the setting, unless the format is known."""
    try:
        weight_format(given)
    except ValueError as error:
        raise ValueError(f"{name}{str(error).removeprefix('weights')}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora(Checked):
    """Low-rank adapters on every matrix of attention and dense MLPs (S-LoRA, Punica: segmented kernels)."""

    rank: PositiveInt
    num_active: PositiveInt = 1
    """Number of different adapters in a batch; each is read once. All of them are kept in memory."""

    def elements(self, matrices: Iterable[Matrix]) -> float:
        """Returns the number of weights of all active adapters: rank (p k + n) for every dense matrix.

        p: number of projections that the matrix fuses, such as 3 for q, k and v; each has its own k x rank.
        """
        dense = (matrix for matrix in matrices if matrix.role is Role.dense)
        sides = sum((max(1, len(m.slices)) * m.k + m.n) * m.count for m in dense)
        return self.num_active * self.rank * sides
