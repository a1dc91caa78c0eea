"""Reads the fields of an `Architecture` from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

import torch

from realengine.model.config_fields import DEFAULT_ROPE_THETA, head_dim_of
from realengine.weights.gguf import GgufFile

GGUF_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
# Llama 3.1 and 3.2 in GGUF: the scaling is stored as factors by frequency, made with these numbers.
LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def fields_of_gguf(file: GgufFile) -> dict[str, Any]:
    """Returns the fields of an `Architecture`. Raises ValueError for what is missing or not supported."""
    metadata, prefix = file.metadata, str(file.metadata.get("general.architecture", "(missing)"))
    if prefix not in GGUF_MODEL_TYPES:
        known = ", ".join(GGUF_MODEL_TYPES)
        raise ValueError(f"general.architecture={prefix}: unknown architecture; supported: {known}")
    model_type = GGUF_MODEL_TYPES[prefix]
    needed = ["embedding_length", "block_count", "feed_forward_length", "context_length"]
    needed += ["attention.head_count", "attention.layer_norm_rms_epsilon"]
    if model_type == "qwen3_moe":
        needed += ["expert_count", "expert_used_count", "expert_feed_forward_length"]
    if missing := [f"{prefix}.{name}" for name in needed if f"{prefix}.{name}" not in metadata]:
        raise ValueError(f"{', '.join(missing)}: missing; {prefix} needs them")

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"{prefix}.{name}", default)

    if model_type == "llama" and get("expert_count"):
        raise ValueError(f"{prefix}.expert_count={get('expert_count')}: Llama with experts is not computed")
    num_heads = get("attention.head_count")
    head_dim = get("attention.key_length") or head_dim_of(get("embedding_length"), num_heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{prefix}.rope.dimension_count={get('rope.dimension_count')}: must be {head_dim}")
    theta = _shortest(get("rope.freq_base", DEFAULT_ROPE_THETA))
    eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    experts = {
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "norm_topk_prob": bool(get("expert_weights_norm", True)),
    }
    return {
        "model_type": model_type,
        "vocab_size": get("vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ())),
        "hidden_size": get("embedding_length"),
        "num_layers": get("block_count"),
        "num_heads": num_heads,
        "num_kv_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "intermediate_size": get("feed_forward_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _gguf_rope_scaling(file, prefix, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "qkv_bias": model_type == "qwen2",
        "qk_norm": model_type in ("qwen3", "qwen3_moe"),
        "sliding_window": get("attention.sliding_window") or None,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": tuple(dict.fromkeys(token for token in eos if token is not None)),
        **(experts if model_type == "qwen3_moe" else {}),
    }


def _shortest(value: float) -> float:
    """Rounds to 7 digits, because GGUF stores fp32, in which 1e-5 is 9.9999997e-6."""
    return float(f"{value:.7g}")


def _gguf_rope_scaling(file: GgufFile, prefix: str, theta: float, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file.read("rope_freqs.weight").double(), theta, head_dim)
    kind = file.metadata.get(f"{prefix}.rope.scaling.type", "none")
    factor = file.metadata.get(f"{prefix}.rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ValueError(f"{prefix}.rope.scaling.type={kind}: not computed; supported: none, linear, yarn")
    context = file.metadata.get(f"{prefix}.rope.scaling.original_context_length")
    if context is None:
        raise ValueError(f"{prefix}.rope.scaling.original_context_length: missing; yarn needs it")
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}


def _llama3_scaling(factors: torch.Tensor, theta: float, head_dim: int) -> dict[str, Any]:
    """Returns the rope scaling whose frequency divisors rope_freqs.weight [head_dim / 2] holds."""
    if factors.numel() != head_dim // 2:
        raise ValueError(f"rope_freqs.weight has {factors.numel()} factors, must have {head_dim // 2}")
    low, high = LLAMA3_SCALING["low_freq_factor"], LLAMA3_SCALING["high_freq_factor"]
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = LLAMA3_SCALING["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    largest = float(factors.max())
    expected = 1 / (kept + (1 - kept) / largest)
    if not torch.allclose(factors, expected, rtol=1e-3):
        raise ValueError("rope_freqs.weight: not the scaling of Llama 3.1 and 3.2, others are not computed")
    return {"rope_type": "llama3", "factor": _shortest(largest), **LLAMA3_SCALING}
