"""Reading a Hugging Face config.json: which architectures are known, and what each of their fields means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    "_name_or_path",
}  # fmt: skip

IRRELEVANT = {
    "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "initializer_range",
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "attention_dropout",
    "mlp_bias", "pretraining_tp", "transformers_version", "use_mrope", "rope_interleaved", "is_llama_config",
    "transformers.js_config", "bos_token", "eos_token",
}  # fmt: skip
"""Fields that change neither bytes nor FLOPs (mlp_bias: below 1e-4 of the weights)."""

DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "bf16", None: "bf16"}


def read_hf_config(path: Path) -> dict[str, Any]:
    """Settings of a `ModelSpec`, from a config.json or the folder that holds one.

    Raises ValueError naming the file and the field, and what is known.
    """
    file = path / "config.json" if path.is_dir() else path
    config = load_json_object(file)
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in ARCHITECTURES:
        unknown = sorted(config.keys() - REQUIRED.keys() - OPTIONAL - IRRELEVANT)
        raise ValueError(
            f"{file}: architectures={architecture}: unknown architecture; known: {', '.join(ARCHITECTURES)}; "
            f"fields not understood: {', '.join(unknown) or 'none'}"
        )
    if missing := [name for name in REQUIRED if config.get(name) is None]:
        raise ValueError(f"{file}: missing {', '.join(missing)}: {architecture} needs them")
    for name in [*REQUIRED, "num_key_value_heads", "head_dim"]:
        if not isinstance(config.get(name, 1), int | None):
            raise ValueError(f"{file}: {name}={config[name]!r}: must be a whole number")
    if config.get("quantization_config"):
        raise ValueError(
            f"{file}: quantization_config: quantised weights cannot be priced; use the bf16 checkpoint"
        )
    return {
        "name": file.resolve().parent.name,
        **{ours: config[theirs] for theirs, ours in REQUIRED.items()},
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": architecture == "Qwen2ForCausalLM" or bool(config.get("attention_bias", False)),
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "sliding_window": sliding_window(config),
        "dtype": checkpoint_dtype(config, file),
        "source": str(file),
    }


def load_json_object(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: must hold one JSON object, holds a {type(config).__name__}")
    return config


def sliding_window(config: dict[str, Any]) -> int | None:
    """The window in force. Qwen writes one down and switches it off with use_sliding_window."""
    window = config.get("sliding_window")
    return window if window and config.get("use_sliding_window", True) else None


def checkpoint_dtype(config: dict[str, Any], file: Path) -> str:
    """Recent versions of transformers write `dtype`, older ones `torch_dtype`."""
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype not in DTYPES:
        known = ", ".join(name for name in DTYPES if name)
        raise ValueError(f"{file}: dtype={dtype}: must be one of {known}")
    return DTYPES[dtype]
