"""Reads the parts of a config.json that the families of models share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hwmodels.checks import is_finite, is_whole
from hwmodels.hf.fields import Fields, wrong
from realengine.weights.quantized_formats import is_fp8

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROPE_TYPES = ("linear", "llama3", "yarn")
DEFAULT_ROPE_THETA = 10000.0  # for files without it, such as the published Llama 2 files
DEFAULT_WINDOW = 4096  # transformers' default for Mistral and Qwen files without a window


def unknown(name: object, known: Sequence[str]) -> ValueError:
    """Returns the error about a model_type that is not supported."""
    return ValueError(f"model_type={name}: unknown architecture; supported: {', '.join(known)}")


def check_activation(fields: Fields) -> None:
    """Raises ValueError unless the MLP's activation is SiLU."""
    if fields.value("hidden_act") not in (None, "silu"):
        raise wrong("hidden_act", fields.value("hidden_act"), "only silu is computed")


def check_no_biases(fields: Fields) -> None:
    """Raises ValueError if linear layers have biases."""
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, default=False):
            raise wrong(name, True, "biases are computed on Qwen2's query, key and value projections only")


def check_variants(fields: Fields) -> None:
    """Raises ValueError for variants that Llama's decoder does not have."""
    check_activation(fields)
    check_no_biases(fields)
    if fields.value("partial_rotary_factor") not in (None, 1, 1.0):
        raise wrong("partial_rotary_factor", fields.value("partial_rotary_factor"), "whole heads are rotated")


def check_plain_weights(fields: Fields) -> None:
    """Raises ValueError unless weights are plain floats or FP8."""
    given = fields.value("quantization_config")
    if given is not None and not is_fp8(given):
        raise wrong("quantization_config", given, "supported for this family: plain weights, FP8")


def head_dim_of(hidden_size: int, num_heads: int) -> int:
    """Returns the size of a head, if the file does not give it. Raises ValueError for a fraction."""
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size={hidden_size}: must be a multiple of num_attention_heads={num_heads}")
    return hidden_size // num_heads


def number(fields: Fields, name: str) -> float:
    """Returns a field that must be a number."""
    value = fields.value(name)
    if not is_finite(value):
        raise wrong(name, value, "must be a number")
    return float(value)


def rope_of(fields: Fields) -> tuple[float, dict[str, Any] | None]:
    """Returns theta and scaling: old files have rope_theta and rope_scaling, new ones rope_parameters."""
    name = "rope_parameters" if fields.value("rope_parameters") else "rope_scaling"
    given = fields.value(name) or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise wrong(name, given, "must be one object of numbers")
    if given.get("rope_theta") is None:
        given = {**given, "rope_theta": fields.value("rope_theta")}
    if given.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise wrong(name, given, "whole heads are rotated: no partial_rotary_factor")
    return scaling_of(name, given, DEFAULT_ROPE_THETA, fields.value("max_position_embeddings"))


def rotary_share(fields: Fields, given: Mapping[str, Any], default: float) -> float:
    """Returns the share of a head that is rotated. given: the object with the rotary settings."""
    share = given.get("partial_rotary_factor") or fields.value("partial_rotary_factor") or default
    if not is_finite(share) or not 0 < share <= 1:
        raise wrong("partial_rotary_factor", share, "must be > 0 and <= 1")
    return float(share)


def partial_rope_of(fields: Fields, head_dim: int, default_share: float) -> dict[str, Any]:
    """Returns the rotary fields of an `Architecture` that rotates part of each head, without scaling."""
    name = "rope_parameters" if fields.value("rope_parameters") else "rope_scaling"
    given = fields.value(name) or {}
    if not isinstance(given, Mapping):
        raise wrong(name, given, "must be an object")
    share = rotary_share(fields, given, default_share)
    given = {"rope_theta": fields.value("rope_theta"), **given}
    theta, _ = scaling_of(name, given, DEFAULT_ROPE_THETA, None, types=())
    return {"rotary_dims": int(head_dim * share), "rope_theta": theta}


def scaling_of(
    name: str,
    given: Mapping[str, Any],
    default_theta: float,
    context: Any,
    types: Sequence[str] = ROPE_TYPES,
) -> tuple[float, dict[str, Any] | None]:
    """Returns theta and scaling of an object with rope_theta, rope_type and its numbers.

    context: the model's context length, that of yarn unless it has one. types: supported, besides default.
    """
    scaling = dict(given)
    theta = scaling.pop("rope_theta", None)
    theta = default_theta if theta is None else theta
    if not is_finite(theta):
        raise wrong("rope_theta", theta, "must be a number")
    kind = scaling.pop("rope_type", None) or scaling.get("type") or "default"
    for other in ("type", "partial_rotary_factor"):
        scaling.pop(other, None)
    if kind == "default":
        return float(theta), None
    if kind not in types:
        raise wrong(name, dict(given), f"supported rope_type: default, {', '.join(types)}")
    if kind == "yarn":
        scaling.setdefault("original_max_position_embeddings", context)
    return float(theta), {"rope_type": kind, **scaling}


def windows_of(fields: Fields, model_type: str, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Returns the sliding window and the layers without it."""
    if model_type == "llama":
        return None, ()
    if model_type == "mixtral":
        return fields.whole_or_none("sliding_window"), ()
    if model_type == "mistral":
        if "sliding_window" in fields.config:
            return fields.whole_or_none("sliding_window"), ()
        return DEFAULT_WINDOW, ()
    if not fields.flag("use_sliding_window", default=False):
        return None, ()
    window = fields.whole("sliding_window", default=DEFAULT_WINDOW)
    kinds = fields.names("layer_types", ("full_attention", "sliding_attention"), num_layers)
    if kinds is not None:
        return window, tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if model_type == "qwen3_moe":
        return window, ()
    first = fields.value("max_window_layers")
    if not is_whole(first) or first < 0:
        raise wrong("max_window_layers", first, "must be a whole number >= 0 with use_sliding_window")
    return window, tuple(range(min(first, num_layers)))


def experts_of(fields: Fields) -> dict[str, Any]:
    """Returns the fields of Qwen3-MoE's experts."""
    return {
        "num_experts": fields.whole("num_experts"),
        "num_experts_per_tok": fields.whole("num_experts_per_tok"),
        "moe_intermediate_size": fields.whole("moe_intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob", default=False),
        "decoder_sparse_step": fields.whole("decoder_sparse_step", default=1),
        "mlp_only_layers": tuple(fields.wholes("mlp_only_layers")),
    }


def dtype_of(fields: Fields) -> torch.dtype:
    """Returns the dtype of a config, in `dtype` or, from older transformers versions, `torch_dtype`."""
    for name in ("dtype", "torch_dtype"):
        value = fields.value(name)
        if value is not None:
            if value not in DTYPES:
                raise wrong(name, value, f"must be one of {', '.join(DTYPES)}")
            return DTYPES[value]
    return torch.bfloat16


def token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    """Returns a field with a token id or a list of them; empty if it is missing."""
    value = fields.value(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_whole(token) and token >= 0 for token in ids):
        raise wrong(name, value, "must be a token id or a list of token ids")
    return tuple(ids)
