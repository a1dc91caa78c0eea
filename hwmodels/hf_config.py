"""Reading a Hugging Face config.json: which architectures are known, and what each of their fields means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hwmodels.checks import is_whole

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

REQUIRED = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
"""Hugging Face's name -> ours."""

OPTIONAL = {
    "architectures", "model_type", "num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "torch_dtype", "dtype",
    "quantization_config", "_name_or_path",
}  # fmt: skip

IRRELEVANT = {
    "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "initializer_range",
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "attention_dropout",
    "mlp_bias", "pretraining_tp", "transformers_version", "use_mrope", "rope_interleaved", "is_llama_config",
    "transformers.js_config", "bos_token", "eos_token", "max_sequence_length", "max_length", "do_sample",
    "temperature", "top_k", "top_p", "repetition_penalty", "return_dict", "tokenizer_class", "id2label",
    "label2id", "use_bfloat16", "_attn_implementation_autoset", "unsloth_fixed", "unsloth_version",
}  # fmt: skip
"""Fields that change neither bytes nor FLOPs (mlp_bias: below 1e-4 of the weights)."""

LAYER_TYPES = ("full_attention", "sliding_attention")

DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "bf16"}


def read_hf_config(path: Path) -> dict[str, Any]:
    """Settings of a `ModelSpec`, from a config.json or the folder that holds one.

    Raises ValueError naming the file, the field, its value and the rule. A field that is not understood is
    refused, since a price without it may be wrong, unless it is null, false, zero or empty.
    """
    file = path / "config.json" if path.is_dir() else path
    config = load_json_object(file)
    try:
        settings = model_settings(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return {"name": file.resolve().parent.name, **settings, "source": str(file)}


def load_json_object(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: must hold one JSON object, holds a {type(config).__name__}")
    return config


def model_settings(config: dict[str, Any]) -> dict[str, Any]:
    """What the fields say, in `ModelSpec`'s terms. Raises ValueError: field=value: rule."""
    architecture = known_architecture(config)
    if missing := [name for name in REQUIRED if config.get(name) is None]:
        raise ValueError(f"missing {', '.join(missing)}: {architecture} needs them")
    if config.get("quantization_config"):
        raise ValueError("quantization_config: quantised weights cannot be priced; use the bf16 checkpoint")
    if unknown := [name for name in fields_not_understood(config) if config[name]]:
        given = ", ".join(f"{name}={shown(config[name])}" for name in unknown)
        raise ValueError(
            f"{given}: not understood, may change what {architecture} computes; "
            "take out of the file what does not"
        )
    sizes = {ours: whole_number(config, theirs) for theirs, ours in REQUIRED.items()}
    return {
        **sizes,
        "num_kv_heads": num_kv_heads(config, sizes["num_heads"]),
        "head_dim": head_dim(config, sizes["hidden_size"], sizes["num_heads"]),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", default=False),
        "qkv_bias": flag(config, "attention_bias", default=False) or architecture == "Qwen2ForCausalLM",
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "sliding_window": sliding_window(config),
        "dtype": checkpoint_dtype(config),
    }


def known_architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise wrong("architectures", names, f"must be a list of one name; known: {', '.join(ARCHITECTURES)}")
    name: str = names[0]
    if name not in ARCHITECTURES:
        raise ValueError(
            f"architectures={name}: unknown architecture; known: {', '.join(ARCHITECTURES)}; "
            f"fields not understood: {', '.join(fields_not_understood(config)) or 'none'}"
        )
    return name


def fields_not_understood(config: dict[str, Any]) -> list[str]:
    return sorted(config.keys() - REQUIRED.keys() - OPTIONAL - IRRELEVANT)


def num_kv_heads(config: dict[str, Any], num_heads: int) -> int:
    """Without the field every head has its own keys and values."""
    heads = whole_number(config, "num_key_value_heads", default=num_heads)
    if num_heads % heads:
        raise wrong("num_key_value_heads", heads, f"must divide num_attention_heads={num_heads}")
    return heads


def head_dim(config: dict[str, Any], hidden_size: int, num_heads: int) -> int:
    """Without the field the heads share the hidden size out."""
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise wrong(
            "hidden_size",
            hidden_size,
            f"must be a multiple of num_attention_heads={num_heads}, or give head_dim",
        )
    return whole_number(config, "head_dim", default=hidden_size // num_heads)


def sliding_window(config: dict[str, Any]) -> int | None:
    """The window in force. Qwen writes one down and switches it off with use_sliding_window."""
    types = config.get("layer_types")
    if not (types is None or (isinstance(types, list) and all(kind in LAYER_TYPES for kind in types))):
        raise wrong("layer_types", types, f"must be a list of {' and '.join(LAYER_TYPES)}")
    in_force = flag(config, "use_sliding_window", default=True)
    window = None if config.get("sliding_window") is None else whole_number(config, "sliding_window")
    return window if in_force else None


def checkpoint_dtype(config: dict[str, Any]) -> str:
    """Recent versions of transformers write `dtype`, older ones `torch_dtype`; without either: bf16."""
    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        if value is not None:
            if not isinstance(value, str) or value not in DTYPES:
                raise wrong(name, value, f"must be one of {', '.join(DTYPES)}")
            return DTYPES[value]
    return "bf16"


def whole_number(config: dict[str, Any], name: str, *, default: int | None = None) -> int:
    """The field, or default, if there is one, where it is missing or null."""
    value: Any = default if config.get(name) is None else config[name]
    if not is_whole(value) or value < 1:
        raise wrong(name, value, "must be a whole number >= 1")
    return int(value)


def flag(config: dict[str, Any], name: str, *, default: bool) -> bool:
    """The field, or default where it is missing or null."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, value, "must be true or false")
    return value


def wrong(name: str, value: Any, rule: str) -> ValueError:
    return ValueError(f"{name}={shown(value)}: {rule}")


def shown(value: Any) -> str:
    """The value as the file writes it, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
