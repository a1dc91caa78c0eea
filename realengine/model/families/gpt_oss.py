"""gpt-oss: attention sinks, alternating windows, biases, a clamped activation, and experts in MXFP4."""

from __future__ import annotations

from typing import Any

from hwmodels.hf.fields import Fields, wrong
from realengine.model.config_fields import check_activation, number
from realengine.model.variants import GptOssParts

GPT_OSS_NEEDED = ("num_key_value_heads", "head_dim", "num_local_experts", "num_experts_per_tok")
GPT_OSS_WINDOW = 128  # transformers' default
DEFAULT_ALPHA, DEFAULT_LIMIT = 1.702, 7.0


def gpt_oss_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of an `Architecture` that this family has of its own."""
    check_activation(fields)
    if not fields.flag("attention_bias", default=True):
        raise wrong("attention_bias", False, "gpt-oss has biases; must be true")
    num_layers = fields.whole("num_hidden_layers")
    kinds = fields.names("layer_types", ("full_attention", "sliding_attention"), num_layers)
    if kinds is None:
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    return {
        "sliding_window": fields.whole("sliding_window", default=GPT_OSS_WINDOW),
        "full_attention_layers": tuple(i for i, kind in enumerate(kinds) if kind == "full_attention"),
        "qkv_bias": True,
        "num_experts": fields.whole("num_local_experts"),
        "num_experts_per_tok": fields.whole("num_experts_per_tok"),
        "moe_intermediate_size": fields.whole("intermediate_size"),
        "norm_topk_prob": True,
        "gpt_oss": GptOssParts(
            alpha=_number_or(fields, "swiglu_alpha", DEFAULT_ALPHA),
            limit=_number_or(fields, "swiglu_limit", DEFAULT_LIMIT),
            is_packed=_is_packed(fields),
        ),
    }


def _number_or(fields: Fields, name: str, default: float) -> float:
    return default if fields.value(name) is None else number(fields, name)


def _is_packed(fields: Fields) -> bool:
    given = fields.value("quantization_config")
    if given is None:
        return False
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method != "mxfp4":
        raise wrong("quantization_config", given, "supported quant_method: mxfp4")
    return True
