"""Linear layers of the blocks: the same call whether the weight is dense or quantised.

Letters: T tokens, K inputs, N outputs. Every layer computes x @ weight^T + bias, [T, N] in x's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.int4_weight import Int4Weight
from kernels.w8a8 import ScaledTensor
from kernels.w8a16 import Int8Weight
from realengine.model.backend import TRITON, Backend
from realengine.model.quantization import QuantisedWeight

FEW_ROWS = 8


class Linear(Protocol):
    """A linear layer: x_TK -> [T, N]."""

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A dense layer, computed by torch, because no kernel of ours is faster."""

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TK, self.weight_NK, self.bias_N)


@dataclass(frozen=True, slots=True, eq=False)
class W4A16:
    """4-bit weights; the torch reference unpacks them at every call and keeps nothing."""

    weight: Int4Weight
    bias_N: torch.Tensor | None
    backend: Backend

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        y_TN: torch.Tensor = self.backend.w4a16_gemm(x_TK, self.weight, self.bias_N)
        return y_TN


@dataclass(frozen=True, slots=True, eq=False)
class W8A16:
    """int8 weights; activations stay in their dtype."""

    weight: Int8Weight
    bias_N: torch.Tensor | None
    backend: Backend

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        y_TN: torch.Tensor = self.backend.w8a16_gemm(x_TK, self.weight, self.bias_N)
        return y_TN


@dataclass(frozen=True, slots=True, eq=False)
class W8A8:
    """int8 or FP8 weights; each token's activations are rounded to the same type first."""

    weight: ScaledTensor
    bias_N: torch.Tensor | None
    backend: Backend

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        x = self.backend.quantise_tokens(x_TK, self.weight.values_RK.dtype)
        y_TN: torch.Tensor = self.backend.w8a8_gemm(x, self.weight, self.bias_N, out_dtype=x_TK.dtype)
        return y_TN


def head_logits(hidden_TH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """Computes the logits [T, V] of hidden states with the weight of an LM head."""
    if hidden_TH.is_cpu and 1 < len(hidden_TH) <= FEW_ROWS:  # in this order 2 to 4 times as fast as F.linear
        return torch.mm(weight_VH, hidden_TH.T).T.contiguous()
    return F.linear(hidden_TH, weight_VH)


def make_linear(
    weight: torch.Tensor | QuantisedWeight, bias_N: torch.Tensor | None, backend: Backend
) -> Linear:
    """Returns the layer that computes with such a weight."""
    if isinstance(weight, Int4Weight):
        return W4A16(weight, bias_N, backend)
    if isinstance(weight, Int8Weight):
        return W8A16(weight, bias_N, backend)
    if isinstance(weight, ScaledTensor):
        return W8A8(weight, bias_N, backend)
    if weight.device.type == "cpu" and backend.name != TRITON.name:
        weight = weight.t().contiguous().t()  # inputs outermost: a third faster for few tokens
    return Dense(weight, bias_N)
