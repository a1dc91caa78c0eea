"""A decoder for gpt-oss: attention sinks, and experts with biases and a clamped activation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kernels.attention import AttentionOptions
from kernels.moe import Biases, Clamp
from realengine.model.decoder import Decoder, Layer, dense
from realengine.model.moe import Experts
from realengine.model.quantization import Weights


@dataclass(frozen=True, slots=True, eq=False)
class BiasedExperts:
    """Experts of gpt-oss. The weights of a token's experts are the softmax of their logits."""

    experts: Experts
    router_bias_E: torch.Tensor
    biases: Biases
    clamp: Clamp

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Computes the output [T, H] in x's dtype."""
        experts = self.experts
        logits_TE = F.linear(x_TH, experts.router_EH, self.router_bias_E)
        routing = experts.backend.moe_route(logits_TE, experts.num_choices, renormalise=True)
        y_TH: torch.Tensor = experts.backend.moe_mlp(
            x_TH, experts.gate_up, experts.down, routing, biases=self.biases, clamp=self.clamp
        )
        return y_TH


class GptOssDecoder(Decoder):
    """A `Decoder` of gpt-oss. Its arguments are those of `Decoder`."""

    def _options(self, index: int, weights: Weights) -> AttentionOptions:
        sinks_H = dense(weights, f"layers.{index}.sinks").float()
        return AttentionOptions(window=self.architecture.window(index), sinks_H=sinks_H)

    def _layer(self, index: int, weights: Weights) -> Layer:
        layer, name, parts = super()._layer(index, weights), f"layers.{index}.", self.architecture.gpt_oss
        assert parts is not None
        assert isinstance(layer.mlp, Experts)
        experts = BiasedExperts(
            layer.mlp,
            dense(weights, f"{name}router.bias"),
            Biases(dense(weights, f"{name}experts_gate_up.bias"), dense(weights, f"{name}experts_down.bias")),
            Clamp(parts.alpha, parts.limit),
        )
        return replace(layer, mlp=experts)
