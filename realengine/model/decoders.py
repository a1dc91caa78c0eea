"""Chooses the decoder of an architecture."""

from __future__ import annotations

from realengine.model.alibi import AlibiDecoder
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
