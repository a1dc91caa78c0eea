"""The decoders of families of models, and the choice of the decoder of an architecture."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kernels.attention import AttentionOptions
from kernels.moe import Biases, Clamp
from kernels.rope_angles import cos_sin_table
from realengine.model.architecture import Architecture
from realengine.model.backend import Backend
from realengine.model.decoder import Decoder, Layer, dense
from realengine.model.latent_attention import LatentDecoder
from realengine.model.lora import AdapterBank
from realengine.model.moe import Experts
from realengine.model.quantization import Weights
from realengine.model.token_exchange import TokenExchange
from realengine.model.variants import GemmaParts
from realengine.runner.batch import Batch
from realengine.runner.parallel import ExpertRanks, Group, Stage


def decoder_of(
    architecture: Architecture,
    weights: Weights,
    backend: Backend,
    max_model_len: int,
    group: Group | None = None,
    adapters: AdapterBank | None = None,
    stage: Stage | None = None,
    expert_ranks: ExpertRanks | None = None,
    exchange: TokenExchange | None = None,
    context: Group | None = None,
) -> Decoder:
    """Returns the decoder of an architecture. The arguments are those of `Decoder`."""
    of_rank = group, adapters, stage, expert_ranks, exchange, context
    return _kind(architecture)(architecture, weights, backend, max_model_len, *of_rank)


def _kind(architecture: Architecture) -> type[Decoder]:
    if architecture.latent is not None:
        return LatentDecoder
    if architecture.alibi:
        return AlibiDecoder
    if architecture.gpt_oss is not None:
        return GptOssDecoder
    return Decoder if architecture.gemma is None else GemmaDecoder


class GemmaDecoder(Decoder):
    """A `Decoder` of Gemma 2 or 3. Its arguments are those of `Decoder`.

    A decoder for Gemma 2 and 3: norms after each part, GELU, caps, and two kinds of rotary positions.
    """

    parts: GemmaParts

    def _prepare(self, weights: Weights, max_model_len: int) -> None:
        parts = self.architecture.gemma
        assert parts is not None
        self.parts = parts
        self._gate = self._backend.gelu_tanh_mul
        self._attention_norms, self._mlp_norms = (
            {i: dense(weights, f"layers.{i}.{of}.weight") for i in self.stage.layers}
            for of in ("post_attention_norm", "post_mlp_norm")
        )
        embedding = dense(weights, "embedding.weight")
        self._embedding_scale = torch.tensor(
            self.architecture.hidden_size**0.5, dtype=embedding.dtype, device=embedding.device
        )
        self._local_table: torch.Tensor | None = None
        if parts.local_rope_theta is not None:
            self._local_table = cos_sin_table(
                self.architecture.head_dim,
                max_model_len,
                base=parts.local_rope_theta,
                device=embedding.device,
            )

    def _options(self, index: int, weights: Weights) -> AttentionOptions:
        return AttentionOptions(
            window=self.architecture.window(index),
            scale=self.parts.query_scale,
            softcap=self.parts.attention_softcap,
        )

    def _table(self, index: int) -> torch.Tensor:
        if self._local_table is None or self.architecture.window(index) is None:
            return super()._table(index)
        return self._local_table

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [T, H] of token ids, times the root of H."""
        return super().embed(tokens_T) * self._embedding_scale

    def head(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Computes the logits [T, V] of final hidden states, on every rank, with their cap."""
        logits_TV, cap = super().head(hidden_TH), self.parts.logits_softcap
        return logits_TV if cap is None else torch.tanh(logits_TV / cap) * cap

    def _output(self, index: int, attended_THD: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._normed(super()._output(index, attended_THD, batch), self._attention_norms[index])

    def mlp(self, index: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Computes the MLP of a layer, and normalises its output."""
        return self._normed(super().mlp(index, hidden, batch), self._mlp_norms[index])

    def _normed(self, x_TH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
        y_TH: torch.Tensor = self._backend.rms_norm(x_TH, weight_H, self.architecture.rms_norm_eps)
        return y_TH


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
    """A `Decoder` of gpt-oss. Its arguments are those of `Decoder`.

    A decoder for gpt-oss: attention sinks, and experts with biases and a clamped activation.
    """

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


class AlibiDecoder(Decoder):
    """A `Decoder` with ALiBi. Its arguments are those of `Decoder`."""

    def _prepare(self, weights: Weights, max_model_len: int) -> None:
        """Replaces the rotary angles by those that rotate nothing: cosines of 1, sines of 0."""
        half = self._cos_sin.shape[1] // 2
        self._cos_sin[:, :half], self._cos_sin[:, half:] = 1.0, 0.0
        slopes = alibi_slopes(self.architecture.num_heads)
        first = self.group.rank * self._num_heads
        self._slopes_H = torch.tensor(slopes[first : first + self._num_heads], device=self.device)

    def _options(self, index: int, weights: Weights) -> AttentionOptions:
        return AttentionOptions(window=self.architecture.window(index), alibi_slopes_H=self._slopes_H)


def alibi_slopes(num_heads: int) -> list[float]:
    """Returns the slope of each head: a geometric sequence, of another number of heads every second of 2 n.

    n, the largest power of two within num_heads: 2^(-8/n), 2^(-16/n), ...; then 2^(-4/n), 2^(-12/n), ...
    """
    num = 1 << int(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (i + 1) / num) for i in range(num)]
    return slopes + [2.0 ** (-4 * (2 * i + 1) / num) for i in range(num_heads - num)]
