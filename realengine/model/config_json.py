"""Reads the fields of an `Architecture` from a config.json in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hwmodels.hf.fields import Fields
from realengine.model.config_fields import (
    check_plain_weights,
    check_variants,
    dtype_of,
    experts_of,
    head_dim_of,
    number,
    rope_of,
    token_ids,
    unknown,
    windows_of,
)
from realengine.model.families import (
    DEEPSEEK_NEEDED,
    GEMMA_NEEDED,
    GPT_OSS_NEEDED,
    baichuan_fields,
    deepseek_fields,
    gemma_fields,
    glm_fields,
    gpt_oss_fields,
    phi3_fields,
)
from realengine.weights.quantized_formats import PackedFormat

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
KV_HEADS = (*REQUIRED, "num_key_value_heads")
QWEN3 = (*KV_HEADS, "head_dim")
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


class Family(NamedTuple):
    """Fields that the config.json of a model_type must have, and its reader."""

    needed: tuple[str, ...]
    read: Callable[[Fields], dict[str, Any]]
    """Returns the fields that all families share, and its own."""


def _plain(model_type: str, **own: Any) -> Callable[[Fields], dict[str, Any]]:
    """Returns the reader of a family with grouped-query attention and SwiGLU."""

    def read(fields: Fields) -> dict[str, Any]:
        check_variants(fields)
        common = _common(fields, own)
        theta, scaling = rope_of(fields)
        window, full_layers = windows_of(fields, model_type, common["num_layers"])
        experts = experts_of(fields) if model_type == "qwen3_moe" else {}
        return {
            **common,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "sliding_window": window,
            "full_attention_layers": full_layers,
            "packed": PackedFormat.from_config(fields.value("quantization_config")),
            **own,
            **experts,
        }

    return read


def _deepseek(fields: Fields) -> dict[str, Any]:
    theta, scaling = rope_of(fields)
    return _common(fields, {"rope_theta": theta, "rope_scaling": scaling, **deepseek_fields(fields)})


def _mixtral(fields: Fields) -> dict[str, Any]:
    experts = {
        "num_experts": fields.whole("num_local_experts"),
        "num_experts_per_tok": fields.whole("num_experts_per_tok"),
        "moe_intermediate_size": fields.whole("intermediate_size"),
        "norm_topk_prob": True,
    }
    check_plain_weights(fields)
    return _plain("mixtral", **experts)(fields)


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    theta, scaling = rope_of(fields)
    return _common(fields, {"rope_theta": theta, "rope_scaling": scaling, **gpt_oss_fields(fields)})


def _phi3(fields: Fields) -> dict[str, Any]:
    return _common(fields, phi3_fields(fields))


def _baichuan(fields: Fields) -> dict[str, Any]:
    return _common(fields, baichuan_fields(fields))


def _glm(fields: Fields) -> dict[str, Any]:
    return _common(fields, glm_fields(fields))


def _gemma(fields: Fields) -> dict[str, Any]:
    own = gemma_fields(fields)
    theta, scaling = (None, None) if "rope_theta" in own else rope_of(fields)
    return _common(fields, {"rope_theta": theta, "rope_scaling": scaling, **own})


FAMILIES: Mapping[str, Family] = {
    "llama": Family(REQUIRED, _plain("llama")),
    "mistral": Family(KV_HEADS, _plain("mistral")),
    "qwen2": Family(KV_HEADS, _plain("qwen2", qkv_bias=True)),
    "qwen3": Family(QWEN3, _plain("qwen3", qk_norm=True)),
    "qwen3_moe": Family((*QWEN3, *EXPERTS), _plain("qwen3_moe", qk_norm=True)),
    "mixtral": Family((*KV_HEADS, "num_local_experts", "num_experts_per_tok"), _mixtral),
    "deepseek_v2": Family((*REQUIRED, *DEEPSEEK_NEEDED), _deepseek),
    "deepseek_v3": Family((*REQUIRED, *DEEPSEEK_NEEDED), _deepseek),
    "gpt_oss": Family((*REQUIRED, *GPT_OSS_NEEDED), _gpt_oss),
    "phi3": Family(REQUIRED, _phi3),
    "baichuan": Family(tuple(name for name in REQUIRED if name != "max_position_embeddings"), _baichuan),
    "glm": Family(KV_HEADS, _glm),
    "gemma2": Family((*REQUIRED, *GEMMA_NEEDED), _gemma),
    "gemma3_text": Family((*REQUIRED, *GEMMA_NEEDED), _gemma),
}


SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Names under which a family's models are also published, with the same fields and tensors."""


def fields_of_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an `Architecture`. Raises ValueError in the form field=value: rule."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in SAME_AS:
        model_type = SAME_AS[model_type]
        config = {**config, "model_type": model_type}
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = (*FAMILIES, *SAME_AS)
        raise unknown(model_type or config.get("architectures") or "(missing)", known)
    if config.get("num_experts") is None:  # transformers 5 writes Qwen3-MoE's number under Mixtral's name
        config = {**config, "num_experts": config.get("num_local_experts")}
    if missing := [name for name in family.needed if config.get(name) is None]:
        raise ValueError(f"{', '.join(missing)}: missing; {model_type} needs them")
    return {"model_type": model_type, **family.read(Fields(config))}


def _common(fields: Fields, own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that all families share, and those of a family itself, which take precedence."""
    num_heads = fields.whole("num_attention_heads")
    return {
        "vocab_size": fields.whole("vocab_size"),
        "hidden_size": fields.whole("hidden_size"),
        "num_layers": fields.whole("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": fields.whole("num_key_value_heads", default=num_heads),
        "head_dim": own.get("head_dim")
        or fields.whole_or_none("head_dim")
        or head_dim_of(fields.whole("hidden_size"), num_heads),
        "intermediate_size": fields.whole("intermediate_size"),
        "max_position_embeddings": own.get("max_position_embeddings")
        or fields.whole("max_position_embeddings"),
        "rms_norm_eps": number(fields, "rms_norm_eps"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
        "dtype": dtype_of(fields),
        "bos_token_id": fields.value("bos_token_id"),
        "eos_token_ids": token_ids(fields, "eos_token_id"),
        **own,
    }
