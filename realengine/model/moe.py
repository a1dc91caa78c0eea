"""Mixture of experts of a block: a router chooses each token's experts and weighs their outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.moe import Routing
from kernels.w8a16 import Int8Weight
from realengine.model.backend import Backend


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """E experts with I intermediate values, num_choices of them per token; H is the hidden size.

    router_EH: in the model's dtype; its softmax is in fp32. gate_up [E, 2 I, H] (gate before up) and down [E,
    H, I]: in the model's dtype, or int8 with one scale per channel. renormalise: a token's weights sum to
    one. Each tensor-parallel rank holds a slice of every expert's I, and its output is a part of the sum.
    """

    router_EH: torch.Tensor
    gate_up: torch.Tensor | Int8Weight
    down: torch.Tensor | Int8Weight
    num_choices: int
    renormalise: bool
    backend: Backend

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Computes the output [T, H] in x's dtype."""
        logits_TE = F.linear(x_TH, self.router_EH)
        routing: Routing = self.backend.moe_route(logits_TE, self.num_choices, renormalise=self.renormalise)
        y_TH: torch.Tensor = self.backend.moe_mlp(x_TH, self.gate_up, self.down, routing)
        return y_TH
