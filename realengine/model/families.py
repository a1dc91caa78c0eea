"""Readers of the config.json of families of models that have other parts than Llama's.

They read the fields that `realengine.model.config_json` does not read for all families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hwmodels.checks import is_finite, is_whole
from hwmodels.hf.fields import Fields, wrong
from realengine.model.config_fields import (
    DEFAULT_ROPE_THETA,
    check_activation,
    check_no_biases,
    check_plain_weights,
    check_variants,
    head_dim_of,
    number,
    partial_rope_of,
    rope_of,
    rotary_share,
    scaling_of,
)
from realengine.model.variants import ExpertRouting, GemmaParts, GptOssParts, LatentSizes, Scoring

ROTARY_HIDDEN = 4096  # hidden size of the 7B models; their configs do not name the kind of positions
VOCAB_2 = 125_696  # vocabulary of Baichuan 2, whose head is normalised


def baichuan_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of an `Architecture` that this family has of its own.

    Baichuan and Baichuan 2: fused queries, keys and values; ALiBi in the 13B models, RoPE in those of 7B.
    """
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


DEEPSEEK_NEEDED = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


def deepseek_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of an `Architecture` that this family has of its own.

    DeepSeek-V2 (Lite included) and V3: multi-head latent attention, shared experts, routing by groups.
    """
    check_variants(fields)
    check_plain_weights(fields)
    nope_dim, rope_dim = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    inner, num_layers = fields.whole("moe_intermediate_size"), fields.whole("num_hidden_layers")
    first = fields.count("first_k_dense_replace")
    return {
        "head_dim": nope_dim + rope_dim,
        "num_kv_heads": fields.whole("num_attention_heads"),
        "latent": LatentSizes(
            query_rank=fields.whole_or_none("q_lora_rank"),
            rank=fields.whole("kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=fields.whole("v_head_dim"),
            scale=(nope_dim + rope_dim) ** -0.5 * _magnitude(fields) ** 2,
            interleaved=fields.flag("rope_interleave", default=True),
        ),
        "num_experts": fields.whole("n_routed_experts"),
        "num_experts_per_tok": fields.whole("num_experts_per_tok"),
        "moe_intermediate_size": inner,
        "norm_topk_prob": fields.flag("norm_topk_prob", default=False),
        "shared_intermediate_size": inner * fields.whole("n_shared_experts"),
        "mlp_only_layers": tuple(range(min(first, num_layers))),
        "routing": _routing(fields),
    }


def _magnitude(fields: Fields) -> float:
    """Returns the factor of queries and keys that a stretched context has besides that of the angles."""
    _, scaling = rope_of(fields)
    if scaling is None or not scaling.get("mscale_all_dim") or scaling.get("factor", 1.0) <= 1:
        return 1.0
    return float(0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0)


def _routing(fields: Fields) -> ExpertRouting:
    scale = fields.value("routed_scaling_factor")
    scale = 1.0 if scale is None else float(scale)
    groups = fields.whole("n_group", default=1)
    chosen = fields.whole("topk_group", default=groups)
    if fields.whole("n_routed_experts") % groups or chosen > groups:
        raise wrong("n_group", groups, f"must divide n_routed_experts, with topk_group={chosen} at most")
    if fields.value("model_type") == "deepseek_v3":
        return ExpertRouting(
            scoring=Scoring.sigmoid,
            num_groups=groups,
            num_chosen_groups=chosen,
            group_choices=2,
            has_correction=True,
            scale=scale,
            epsilon=1e-20,
        )
    method = fields.value("topk_method")
    if method not in (None, "greedy", "group_limited_greedy"):
        raise wrong("topk_method", method, "must be greedy or group_limited_greedy")
    if fields.flag("norm_topk_prob", default=False):
        raise wrong("norm_topk_prob", True, "DeepSeek-V2's own code does not normalise; must be false")
    if method != "group_limited_greedy":
        return ExpertRouting(scale=scale)
    return ExpertRouting(num_groups=groups, num_chosen_groups=chosen, scale=scale)


GEMMA_NEEDED = ("num_key_value_heads", "head_dim", "query_pre_attn_scalar")
GELU = "gelu_pytorch_tanh"
GEMMA_WINDOW = 4096  # transformers' default
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # transformers' defaults for Gemma 3
GEMMA_PATTERNS = {"gemma2": 2, "gemma3_text": 6}
"""Every how many layers one has no window."""


def gemma_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of an `Architecture` that this family has of its own.

    Gemma 2 and 3 (text): norms before and after each part, alternating windows, caps on scores and logits.
    """
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


GLM_SHARE = 0.5  # transformers' default for files without partial_rotary_factor


def glm_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of an `Architecture` that this family has of its own.

    GLM-4: parts of heads rotated in neighbouring pairs, biases of projections, gate and up fused.
    """
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


GPT_OSS_NEEDED = ("num_key_value_heads", "head_dim", "num_local_experts", "num_experts_per_tok")
GPT_OSS_WINDOW = 128  # transformers' default
DEFAULT_ALPHA, DEFAULT_LIMIT = 1.702, 7.0


def gpt_oss_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of an `Architecture` that this family has of its own.

    gpt-oss: attention sinks, alternating windows, biases, a clamped activation, and experts in MXFP4.
    """
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


LONGROPE = ("su", "yarn", "longrope")  # names of longrope in files of different age


def phi3_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of an `Architecture` that this family has of its own.

    Phi-3 and Phi-4 (mini): fused projections in the checkpoint, parts of heads rotated, longrope.
    """
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
