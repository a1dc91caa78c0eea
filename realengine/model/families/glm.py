"""GLM-4: parts of heads rotated in neighbouring pairs, biases of projections, gate and up fused."""

from __future__ import annotations

from typing import Any

from hwmodels.hf.fields import Fields
from realengine.model.config_fields import (
    check_activation,
    check_plain_weights,
    head_dim_of,
    partial_rope_of,
)

GLM_SHARE = 0.5  # transformers' default for files without partial_rotary_factor


def glm_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of an `Architecture` that this family has of its own."""
    check_activation(fields)
    check_plain_weights(fields)
    head_dim = fields.whole_or_none("head_dim") or head_dim_of(
        fields.whole("hidden_size"), fields.whole("num_attention_heads")
    )
    rope = partial_rope_of(fields, head_dim, GLM_SHARE)
    return {
        "head_dim": head_dim,
        **rope,
        "interleaved_rope": True,
        "qkv_bias": fields.flag("attention_bias", default=True),
        "fused_gate_up": True,
    }
