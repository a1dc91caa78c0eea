"""Phi-3 and Phi-4 (mini): fused projections in the checkpoint, parts of heads rotated, longrope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwmodels.checks import is_finite, is_whole
from hwmodels.hf.fields import Fields, wrong
from realengine.model.config_fields import (
    DEFAULT_ROPE_THETA,
    check_activation,
    check_no_biases,
    check_plain_weights,
    head_dim_of,
    rotary_share,
    scaling_of,
)

LONGROPE = ("su", "yarn", "longrope")  # names of longrope in files of different age


def phi3_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of an `Architecture` that this family has of its own."""
    check_activation(fields)
    check_no_biases(fields)
    check_plain_weights(fields)
    num_heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    head_dim = fields.whole_or_none("head_dim") or head_dim_of(hidden, num_heads)
    given = fields.value("rope_parameters") or fields.value("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise wrong("rope_scaling", given, "must be an object")
    rotary_dim = int(head_dim * rotary_share(fields, given, 1.0))
    theta, scaling = _longrope(fields, given, rotary_dim)
    return {
        "head_dim": head_dim,
        "rotary_dims": rotary_dim,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "sliding_window": fields.whole_or_none("sliding_window"),
        "fused_qkv": True,
        "fused_gate_up": True,
    }


def _longrope(
    fields: Fields, given: Mapping[str, Any], rotary_dim: int
) -> tuple[float, dict[str, Any] | None]:
    given = {"rope_theta": fields.value("rope_theta"), **given}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ("default", *LONGROPE):
        raise wrong("rope_scaling", dict(given), f"supported rope_type: default, {', '.join(LONGROPE)}")
    given = {**given, "rope_type": "longrope" if kind in LONGROPE else kind}
    theta, scaling = scaling_of("rope_scaling", given, DEFAULT_ROPE_THETA, None, types=("longrope",))
    if scaling is None:
        return theta, None
    for name in ("short_factor", "long_factor"):
        factors = scaling.get(name)
        if (
            not isinstance(factors, list)
            or len(factors) != rotary_dim // 2
            or not all(is_finite(factor) and factor > 0 for factor in factors)
        ):
            raise wrong(name, factors, f"must be a list of {rotary_dim // 2} numbers > 0")
    longest = fields.whole("max_position_embeddings")
    original = scaling.get("original_max_position_embeddings") or fields.value(
        "original_max_position_embeddings"
    )
    if not is_whole(original) or original < 1:
        raise wrong("original_max_position_embeddings", original, "must be a whole number; longrope needs it")
    return theta, {
        "rope_type": "longrope",
        "short_factor": scaling["short_factor"],
        "long_factor": scaling["long_factor"],
        "original_max_position_embeddings": original,
        "factor": scaling.get("factor") or longest / original,
        "attention_factor": scaling.get("attention_factor"),
    }
