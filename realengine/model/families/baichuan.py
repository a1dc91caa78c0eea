"""Baichuan and Baichuan 2: fused queries, keys and values; ALiBi in the 13B models, RoPE in those of 7B."""

from __future__ import annotations

from typing import Any

from hwmodels.hf.fields import Fields
from realengine.model.config_fields import DEFAULT_ROPE_THETA, check_activation, check_plain_weights, number

ROTARY_HIDDEN = 4096  # hidden size of the 7B models; their configs do not name the kind of positions
VOCAB_2 = 125_696  # vocabulary of Baichuan 2, whose head is normalised


def baichuan_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of an `Architecture` that this family has of its own."""
    check_activation(fields)
    check_plain_weights(fields)
    has_positions = fields.value("max_position_embeddings") is not None
    has_theta = fields.value("rope_theta") is not None
    longest = "max_position_embeddings" if has_positions else "model_max_length"
    return {
        "rope_theta": number(fields, "rope_theta") if has_theta else DEFAULT_ROPE_THETA,
        "max_position_embeddings": fields.whole(longest),
        "alibi": fields.whole("hidden_size") != ROTARY_HIDDEN,
        "normalised_head": fields.whole("vocab_size") == VOCAB_2,
        "fused_qkv": True,
    }
