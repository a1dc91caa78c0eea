"""Quantises the weights of the blocks' linear layers to 4 or 8 bits when they are loaded.

| quantization | weights | activations | experts |
| --- | --- | --- | --- |
| w4a16 | 4 bits in groups of up to 128 inputs, asymmetric (as in AWQ and GPTQ) | unchanged | no |
| w8a16 | int8, one scale per channel | unchanged | yes |
| mxfp4 | unchanged | unchanged | 4 bits in blocks of 32 inputs (MXFP4), weights only |
| int8 | int8, one scale per channel | int8, one scale per token (W8A8) | no |
| fp8 | float8_e4m3fn, one scale per channel | float8_e4m3fn, one scale per token (W8A8) | no |

Embedding, output head, norms, biases and router stay in the model's dtype. Numbers are rounded to the
nearest; rows (outputs) are rounded a slice at a time, so that a layer needs little additional memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from kernels.int4_weight import GROUP_SIZES, RUN, Int4Weight, quantise_int4
from kernels.mxfp4_weight import Mxfp4Weight, quantise_mxfp4
from kernels.w8a8 import FP8, ScaledTensor, quantise_tokens_reference
from kernels.w8a16 import Int8Weight, quantise_int8

LINEAR_QUANTIZATIONS = ("w4a16", "w8a16", "int8", "fp8")
QUANTIZATIONS = (*LINEAR_QUANTIZATIONS, "mxfp4")
EXPERT_QUANTIZATIONS = ("w8a16", "mxfp4")
LINEARS = ("qkv", "o", "gate_up", "down", "q", "q_a", "kv_a", "shared_gate_up", "shared_down")
EXPERTS = ("experts_gate_up", "experts_down")
ELEMENTS_AT_ONCE = 1 << 26  # rounded at once in fp32: 256 MiB, and a few times that for temporaries

QuantisedWeight: TypeAlias = Int4Weight | Int8Weight | ScaledTensor | Mxfp4Weight
Weights: TypeAlias = dict[str, torch.Tensor | QuantisedWeight]


def check_quantization(quantization: str | None) -> None:
    """Raises ValueError unless the name is in QUANTIZATIONS or None."""
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization={quantization}: must be None or one of {', '.join(QUANTIZATIONS)}")


def is_linear(name: str) -> bool:
    """Returns whether a weight's name is that of a linear layer of a block."""
    return _kind(name) in LINEARS


def quantised(name: str, weight: torch.Tensor, quantization: str | None) -> torch.Tensor | QuantisedWeight:
    """Returns a weight in the given format, or unchanged if the format does not apply to it.

    name: its own name (`realengine.weights.table`); weight: [N, K], of experts [E, N, K]. Raises ValueError
    with the layer if the kernels do not support its shape.
    """
    if quantization is None or not name.endswith(".weight"):
        return weight
    if _kind(name) in EXPERTS and quantization in EXPERT_QUANTIZATIONS:
        if quantization == "mxfp4":
            packed = [quantise_mxfp4(expert) for expert in weight]
            return Mxfp4Weight(*(torch.stack(tensors) for tensors in zip(*packed, strict=True)))
        experts = [quantise_int8(expert) for expert in weight]
        return Int8Weight(*(torch.stack(tensors) for tensors in zip(*experts, strict=True)))
    if not is_linear(name) or quantization == "mxfp4":
        return weight
    num_inputs = weight.shape[1]
    if quantization == "w4a16":
        check_int4_inputs(name, num_inputs)
    rows = max(1, ELEMENTS_AT_ONCE // num_inputs)
    rounding = _rounding(quantization, num_inputs)
    return concatenated([rounding(part) for part in torch.split(weight, rows)])


def check_int4_inputs(name: str, num_inputs: int) -> None:
    """Raises ValueError unless the 4-bit kernel supports a layer with num_inputs inputs."""
    if num_inputs % RUN:
        raise ValueError(
            f"{name}: has {num_inputs} inputs; quantization=w4a16 supports multiples of {RUN}, "
            "w8a16 any number"
        )


def concatenated(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Concatenates weights of the same inputs along the outputs. The order of inputs must be the same."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Int4Weight):
        return first._replace(
            words_BNI=torch.cat([part[0] for part in parts], dim=1),
            scales_GN=torch.cat([part[1] for part in parts], dim=1),
            zeros_GN=torch.cat([part[2] for part in parts], dim=1),
        )
    return type(first)(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _kind(name: str) -> str:
    """Returns "qkv" of "layers.3.qkv.weight"."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _rounding(quantization: str, num_inputs: int) -> Callable[[torch.Tensor], QuantisedWeight]:
    if quantization == "w4a16":
        fitting = [size for size in GROUP_SIZES if num_inputs % size == 0]
        return partial(quantise_int4, group_size=max(fitting, default=min(GROUP_SIZES)))
    if quantization == "w8a16":
        return partial(quantise_int8)
    return partial(quantise_tokens_reference, dtype=FP8 if quantization == "fp8" else torch.int8)


def weights_on(weights: Weights, device: torch.device) -> Weights:
    """Returns weights on a device; those that are there are not copied, and equal tensors stay one."""
    done: dict[int, torch.Tensor] = {}

    def moved(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return done.setdefault(id(part), part.to(device))
        return type(part)(*map(moved, part)) if isinstance(part, tuple) else part

    return {name: moved(weight) for name, weight in weights.items()}
