"""Converts our architecture to a transformers config of the same sizes."""

from __future__ import annotations

from typing import Any

from realengine.model.architecture import Architecture


def peer_config(kind: Any, spec: Architecture, **own: Any) -> Any:
    """Builds a config. kind: a class of transformers, such as LlamaConfig. own: further settings of it."""
    return kind(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        **own,
    )
