"""Quantised formats of linear layers in checkpoints: 4 bits as AWQ or GPTQ, and FP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hwmodels.checks import is_whole
from hwmodels.hf.fields import wrong
from kernels.int4_weight import GROUP_SIZES

FP8_BLOCK = 128
FP8_METHODS = ("fp8", "compressed-tensors")


def is_fp8(config: Any) -> bool:
    """Returns whether a quantization_config is of FP8 weights. Raises ValueError for other blocks."""
    if not isinstance(config, Mapping) or config.get("quant_method") not in FP8_METHODS:
        return False
    block = config.get("weight_block_size")
    if block is not None and block != [FP8_BLOCK, FP8_BLOCK]:
        raise wrong("quantization_config.weight_block_size", block, f"must be [{FP8_BLOCK}, {FP8_BLOCK}]")
    for group in (config.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        bits, kind = weights.get("num_bits"), weights.get("type")
        if not is_whole(bits) or bits != 8 or kind != "float":
            raise wrong("quantization_config.config_groups", weights, "supported: type float with num_bits 8")
    return True


CONFIG = "quantization_config"
METHODS = ("awq", "gptq")
BITS = 4
PER_WORD = 32 // BITS


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedFormat:
    """4-bit format of a checkpoint's linear layers, as AWQ or GPTQ (Lin 2024, Frantar 2023).

    Instead of a projection's `weight` [N, K] there are, with G groups of inputs (K / group_size, or one):

        | tensor  | AWQ "gemm"       | GPTQ             |                                               |
        | qweight | int32 [K, N / 8] | int32 [K / 8, N] | eight weights per word                        |
        | qzeros  | int32 [G, N / 8] | int32 [G, N / 8] | zero points; less one in GPTQ's first format  |
        | scales  | [G, N]           | [G, N]           |                                               |
        | g_idx   |                  | int32 [K]        | each input's group, if it is stored           |
    """

    quant_method: str
    """Quantization method: awq or gptq."""
    group_size: int
    """Number of inputs that share a scale; -1: all."""
    zeros_less_one: bool = False
    """Whether zero points are stored less one, as in GPTQ's first format."""

    @classmethod
    def from_config(cls, config: Any) -> PackedFormat | None:
        """Reads a config.json's quantization_config; None if it has none.

        Raises ValueError for formats that are not supported.
        """
        if not config or is_fp8(config):
            return None
        method = config.get("quant_method") if isinstance(config, Mapping) else None
        if method not in METHODS:
            raise wrong(
                f"{CONFIG}.quant_method", method, f"supported: plain weights, fp8, {', '.join(METHODS)}"
            )
        bits = config.get("bits", config.get("w_bit"))
        if bits != BITS:
            raise wrong(f"{CONFIG}.bits", bits, f"must be {BITS}")
        group_size = config.get("group_size", config.get("q_group_size"))
        if group_size not in (-1, *GROUP_SIZES):
            raise wrong(f"{CONFIG}.group_size", group_size, "must be 32, 64, 128 or -1 (one group)")
        if method == "awq":
            version = str(config.get("version", "gemm")).lower()
            if version != "gemm" or not config.get("zero_point", True):
                raise wrong(f"{CONFIG}.version", version, "must be gemm, with zero_point=true")
            return cls(quant_method=method, group_size=group_size)
        kind = config.get("checkpoint_format", "gptq")
        if kind not in ("gptq", "gptq_v2"):
            raise wrong(f"{CONFIG}.checkpoint_format", kind, "must be gptq or gptq_v2")
        return cls(quant_method=method, group_size=group_size, zeros_less_one=kind == "gptq")

    def shapes(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Returns shapes of the tensors that replace a weight [N, K]; the checkpoint may also have g_idx."""
        n, k = shape
        groups = 1 if self.group_size == -1 else -(-k // self.group_size)
        words = (k, n // PER_WORD) if self.quant_method == "awq" else (k // PER_WORD, n)
        shapes = {"qweight": words, "qzeros": (groups, n // PER_WORD), "scales": (groups, n)}
        return {stored_as(name, kind): shape for kind, shape in shapes.items()}


def stored_as(name: str, kind: str) -> str:
    """Returns the name of a tensor that replaces a weight: "...q_proj.weight" -> "...q_proj.qweight"."""
    return name.removesuffix("weight") + kind
