"""Recognises the quantization_config of checkpoints with FP8 weights (`realengine.weights.fp8`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwmodels.checks import is_whole
from hwmodels.hf.fields import wrong

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
