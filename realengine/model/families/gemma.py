"""Gemma 2 and 3 (text): norms before and after each part, alternating windows, caps on scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwmodels.checks import is_finite
from hwmodels.hf.fields import Fields, wrong
from realengine.model.config_fields import check_plain_weights, number, scaling_of
from realengine.model.variants import GemmaParts

GEMMA_NEEDED = ("num_key_value_heads", "head_dim", "query_pre_attn_scalar")
GELU = "gelu_pytorch_tanh"
GEMMA_WINDOW = 4096  # transformers' default
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # transformers' defaults for Gemma 3
GEMMA_PATTERNS = {"gemma2": 2, "gemma3_text": 6}
"""Every how many layers one has no window."""


def gemma_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of an `Architecture` that this family has of its own."""
    for name in ("hidden_act", "hidden_activation"):
        if fields.value(name) not in (None, GELU):
            raise wrong(name, fields.value(name), f"only {GELU} is computed for this family")
    for name in ("attention_bias", "use_bidirectional_attention"):
        if fields.flag(name, default=False):
            raise wrong(name, True, "is not computed; must be false")
    check_plain_weights(fields)
    num_layers, kind = fields.whole("num_hidden_layers"), str(fields.value("model_type"))
    kinds = fields.names("layer_types", ("full_attention", "sliding_attention"), num_layers)
    if kinds is None:
        every = fields.whole("sliding_window_pattern", default=GEMMA_PATTERNS[kind])
        full = tuple(i for i in range(num_layers) if (i + 1) % every == 0)
    else:
        full = tuple(i for i, name in enumerate(kinds) if name == "full_attention")
    rope = _rope_of_gemma3(fields) if kind == "gemma3_text" else {}
    return {
        "sliding_window": fields.whole("sliding_window", default=GEMMA_WINDOW),
        "full_attention_layers": full,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
        "qk_norm": kind == "gemma3_text",
        **{name: value for name, value in rope.items() if name != "local_rope_theta"},
        "gemma": GemmaParts(
            query_scale=number(fields, "query_pre_attn_scalar") ** -0.5,
            attention_softcap=_cap(fields, "attn_logit_softcapping"),
            logits_softcap=_cap(fields, "final_logit_softcapping"),
            local_rope_theta=rope.get("local_rope_theta"),
        ),
    }


def _cap(fields: Fields, name: str) -> float | None:
    return None if fields.value(name) is None else number(fields, name)


def _rope_of_gemma3(fields: Fields) -> dict[str, Any]:
    """Returns theta and scaling of layers without a window, and theta of the others, which are not scaled."""
    given = fields.value("rope_parameters")
    if isinstance(given, Mapping) and "full_attention" in given:
        full, local = given.get("full_attention") or {}, given.get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise wrong("rope_parameters", given, "layers with a window are computed without scaling only")
    else:
        full = {"rope_theta": fields.value("rope_theta"), **(fields.value("rope_scaling") or {})}
        local = {"rope_theta": fields.value("rope_local_base_freq")}
    theta, scaling = scaling_of(
        "rope_parameters", full, GLOBAL_THETA, fields.value("max_position_embeddings")
    )
    local_theta = local.get("rope_theta") or LOCAL_THETA
    if not is_finite(local_theta):
        raise wrong("rope_local_base_freq", local_theta, "must be a number")
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": float(local_theta)}
