"""Memory of KV caches and of quantised weights."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.reproduce.claims.built import PALM, decode, model
from hwmodels.model import ModelSpec

LATENT = ("model=deepseek_r1", "model.config.num_hidden_layers=60")  # the attention of DeepSeek-V2
EXPANDED = (  # the same 128 heads of 128 with keys and values of their own
    "model=llama2_70b",
    "model.config.num_hidden_layers=60",
    "model.config.num_attention_heads=128",
    "model.config.num_key_value_heads=128",
    "+model.config.head_dim=128",
)
CONTEXT = 4096
WHOLE = ("model=llama2_7b", "model.config.max_position_embeddings=16384")


NAMED = {"palm": PALM, "latent": LATENT, "expanded": EXPANDED, "whole": WHOLE}
"""Settings that several rows name."""


def kv_of(num_tokens: int, unit_bytes: float, *settings: str) -> float:
    """Returns the KV of so many tokens without a window, in a unit."""
    return num_tokens * _model(settings).kv_bytes_per_token() / unit_bytes


def kv_ratio(more: Sequence[str], less: Sequence[str], num_tokens: int = CONTEXT) -> float:
    """Returns how many times as much KV a sequence needs with the settings `more`."""
    return _model(more).kv_bytes_of_sequence(num_tokens) / _model(less).kv_bytes_of_sequence(num_tokens)


def weight_ratio(name: str, weights: str) -> float:
    """Returns the bytes of all weights of a model on one device over those with other weights."""
    return model(name).weight_bytes_per_rank(1) / model(name, weights).weight_bytes_per_rank(1)


def awq_speedup() -> float:
    """Returns the speed of a decode with int4 weights over that with fp16 weights."""
    return awq_ms(False) / awq_ms(True)


def _model(settings: Sequence[str]) -> ModelSpec:
    return model(*(setting for word in settings for setting in NAMED.get(word, (word,))))


def awq_ms(is_quantised: bool) -> float:
    """Returns the milliseconds of a token of one sequence on the GPU of AWQ's table."""
    weights = ("model.weights=int4_wo",) if is_quantised else ()
    return 1e3 * decode("model=llama2_7b", "hardware=rtx_4090", "engine=vllm", *weights, context=200).seconds
