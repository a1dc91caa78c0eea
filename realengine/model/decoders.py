"""Chooses the decoder of an architecture."""

from __future__ import annotations

import math

import torch

from kernels.attention import AttentionOptions
from realengine.model.architecture import Architecture
from realengine.model.backend import Backend
from realengine.model.decoder import Decoder
from realengine.model.gemma import GemmaDecoder
from realengine.model.gpt_oss import GptOssDecoder
from realengine.model.latent_attention import LatentDecoder
from realengine.model.lora import AdapterBank
from realengine.model.quantization import Weights
from realengine.runner.parallel import Group


def decoder_of(
    architecture: Architecture,
    weights: Weights,
    backend: Backend,
    max_model_len: int,
    group: Group | None = None,
    adapters: AdapterBank | None = None,
) -> Decoder:
    """Returns the decoder of an architecture. The arguments are those of `Decoder`."""
    return _kind(architecture)(architecture, weights, backend, max_model_len, group, adapters)


def _kind(architecture: Architecture) -> type[Decoder]:
    if architecture.latent is not None:
        return LatentDecoder
    if architecture.alibi:
        return AlibiDecoder
    if architecture.gpt_oss is not None:
        return GptOssDecoder
    return Decoder if architecture.gemma is None else GemmaDecoder


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
