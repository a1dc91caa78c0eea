"""Weights outside the layers, and names of fields, in which a few architectures differ from the usual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwmodels.hf.fields import Fields
from hwmodels.hf.usual import with_usual_names
from hwmodels.model.model_spec import OtherWeights


def none(fields: Fields) -> tuple[OtherWeights, ...]:
    """Returns no weights besides the vocabulary's."""
    return ()


def learned_positions(fields: Fields) -> tuple[OtherWeights, ...]:
    """Returns the table of one vector per position (GPT-2, OPT)."""
    elements = fields.whole("max_position_embeddings") * fields.whole("hidden_size")
    return (OtherWeights(name="positions", elements=elements),)


def per_layer_embeddings(fields: Fields) -> tuple[OtherWeights, ...]:
    """Returns the table with a vector per token and layer, and its projections (Gemma 3n, Gemma 4)."""
    width, num_layers = fields.count("hidden_size_per_layer_input"), fields.whole("num_hidden_layers")
    rows, hidden = fields.count("vocab_size_per_layer_input"), fields.whole("hidden_size")
    if not width or not rows:
        return ()
    table = rows * num_layers * width
    projections = num_layers * width * hidden * 3
    return (OtherWeights(name="per-layer embeddings", elements=table + projections),)


def gemma3n_tables(fields: Fields) -> tuple[OtherWeights, ...]:
    """Returns per-layer embeddings, and the matrices of LAuReL and AltUp."""
    hidden, num_layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
    laurel = 2 * hidden * fields.count("laurel_rank") * num_layers
    streams = fields.count("altup_num_inputs")
    altup = 2 * max(0, streams - 1) * hidden**2
    fields.ignore("altup_active_idx", "altup_coef_clip", "altup_correct_scale", "altup_lr_multiplier")
    others = OtherWeights(name="LAuReL and AltUp", elements=laurel + altup) if laurel + altup else None
    return (*per_layer_embeddings(fields), *([others] if others else []))


def falcon_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Falcon's fields: multi_query means one KV head, unless the newer decoder states its number."""
    named = with_usual_names(config)
    newer = named.pop("new_decoder_architecture", False)
    if named.pop("multi_query", True) and not newer:
        named["num_key_value_heads"] = 1
    elif not newer:
        named.pop("num_key_value_heads", None)
    named["mlp_bias"] = named["attention_bias"] = bool(named.pop("bias", False))
    return named


def chatglm_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ChatGLM's fields: groups of queries if multi_query_attention is set."""
    named = dict(config)
    groups = named.pop("multi_query_group_num", None)
    if named.pop("multi_query_attention", False):
        named["num_key_value_heads"] = groups
    return with_usual_names(named)


def big_code_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns GPT-BigCode's fields: multi_query means one KV head."""
    named = with_usual_names(config)
    if named.pop("multi_query", True):
        named["num_key_value_heads"] = 1
    return named


def mpt_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns MPT's fields; attn_config may state the number of KV heads."""
    named = with_usual_names(config)
    inner = named.pop("attn_config", None)
    kind = inner.get("attn_type") if isinstance(inner, Mapping) else None
    if kind == "multiquery_attention":
        named["num_key_value_heads"] = 1
    elif kind == "grouped_query_attention" and isinstance(inner, Mapping):
        named["num_key_value_heads"] = inner.get("kv_n_heads")
    ratio = named.pop("expansion_ratio", 4)
    if isinstance(ratio, int) and isinstance(named.get("hidden_size"), int):
        named.setdefault("intermediate_size", ratio * named["hidden_size"])
    return named


def dbrx_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns DBRX's fields, part of which are in attn_config and ffn_config."""
    named = with_usual_names(config)
    fields = Fields(named)
    attention, ffn = (fields.part(name).config for name in ("attn_config", "ffn_config"))
    named = {name: value for name, value in named.items() if name not in ("attn_config", "ffn_config")}
    named["num_key_value_heads"] = attention.get("kv_n_heads")
    named["intermediate_size"] = ffn.get("ffn_hidden_size")
    named["num_experts"], named["num_experts_per_tok"] = ffn.get("moe_num_experts"), ffn.get("moe_top_k")
    return named


def qwen_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the first Qwen's fields: intermediate_size is that of gate and up projection together."""
    named = with_usual_names(config)
    width = named.get("intermediate_size")
    if isinstance(width, int):
        named["intermediate_size"] = width // 2
    return named


def nemotron_h_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Nemotron-H's fields; newer files state the number of layers by listing their kinds."""
    named = with_usual_names(config)
    kinds = named.get("layers_block_type")
    if named.get("num_hidden_layers") is None and isinstance(kinds, list):
        named["num_hidden_layers"] = len(kinds)
    return named
