"""The computation of a decoder-only checkpoint: sizes and switches from config.json or a GGUF file.

Llama 2 and 3.x and SmolLM2 (all `llama`), Mistral, Qwen2 and 2.5, Qwen3, Qwen3-MoE. All of them: pre-norm
with RMSNorm, rotary positions in the neox layout (pairs i, i + head_dim / 2), grouped-query attention,
SwiGLU. A model with another variant is rejected, never computed wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hwmodels.checks import check_finite, check_whole, is_finite, is_whole
from hwmodels.hf.config import read_hf_config
from hwmodels.hf.fields import Fields, wrong
from realengine.weights.gguf import GgufFile
from realengine.weights.packed_format import PackedFormat

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
GGUF_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROPE_TYPES = ("linear", "llama3", "yarn")
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
QWEN3 = ("num_key_value_heads", "head_dim")
NEEDED = {
    "llama": REQUIRED,
    "mistral": (*REQUIRED, "num_key_value_heads"),
    "qwen2": (*REQUIRED, "num_key_value_heads"),
    "qwen3": (*REQUIRED, *QWEN3),
    "qwen3_moe": (*REQUIRED, *QWEN3, "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
}
DEFAULT_ROPE_THETA = 10000.0  # for files without it, such as the published Llama 2 files
DEFAULT_WINDOW = 4096  # transformers' default for Mistral and Qwen files without a window
# Llama 3.1 and 3.2 in GGUF: the scaling is stored as factors by frequency, made with these numbers.
LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Sizes and variants of one model. Raises ValueError in the form field=value: rule."""

    model_type: str
    """One of MODEL_TYPES."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Size of dense MLPs; experts have moe_intermediate_size."""
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float = DEFAULT_ROPE_THETA
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    """rope_type and its numbers; None: unscaled."""
    tie_word_embeddings: bool = False
    """Whether the output head is the embedding table."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have biases (Qwen2)."""
    qk_norm: bool = False
    """Whether each head of queries and keys has an RMSNorm before it is rotated (Qwen3)."""
    sliding_window: int | None = None
    """Number of tokens that a query attends to, its own included; None: all."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers without the window."""
    num_experts: int = 0
    """Number of experts; 0: every layer is dense."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    decoder_sparse_step: int = 1
    """Interval of layers with experts."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers without experts."""
    dtype: torch.dtype = torch.bfloat16
    """Dtype of the checkpoint; bf16 if it does not say."""
    packed: PackedFormat | None = None
    """4-bit format of the checkpoint's linear layers (AWQ, GPTQ); None: plain floats."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.model_type not in MODEL_TYPES:
            raise unknown(self.model_type)
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            check_whole(name, getattr(self, name))
        check_whole("intermediate_size", self.intermediate_size)
        check_whole("max_position_embeddings", self.max_position_embeddings)
        check_whole("decoder_sparse_step", self.decoder_sparse_step)
        check_finite("rms_norm_eps", self.rms_norm_eps)
        check_finite("rope_theta", self.rope_theta)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, because RoPE rotates pairs")
        if self.sliding_window is not None:
            check_whole("sliding_window", self.sliding_window)
        if self.num_experts:
            check_whole("moe_intermediate_size", self.moe_intermediate_size)
            check_whole("num_experts_per_tok", self.num_experts_per_tok)
            if self.num_experts_per_tok > self.num_experts:
                raise ValueError(
                    f"num_experts_per_tok={self.num_experts_per_tok}: must be at most num_experts, "
                    f"{self.num_experts}"
                )

    @classmethod
    def from_path(cls, path: Path) -> Architecture:
        """Reads a .gguf file, a config.json or the folder that holds one."""
        if path.suffix == ".gguf":
            return cls.from_gguf(GgufFile(path))
        return cls.from_hf(path)

    @classmethod
    def from_hf(cls, source: Path | Mapping[str, Any]) -> Architecture:
        """Reads a config.json, the folder that holds one, or its fields."""
        if isinstance(source, Mapping):
            return cls(**_from_hf(source))
        file, config = read_hf_config(source)
        try:
            return cls(**_from_hf(config))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Architecture:
        """Reads the metadata of a GGUF file. The dtype is bf16: the stored types are dequantised."""
        try:
            return cls(**_from_gguf(file))
        except ValueError as error:
            raise ValueError(f"{file.path}: {error}") from None

    def has_experts(self, layer: int) -> bool:
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    def window(self, layer: int) -> int | None:
        """Returns the number of tokens that a query of this layer attends to, itself included; None: all."""
        return None if layer in self.full_attention_layers else self.sliding_window


def unknown(name: object) -> ValueError:
    """Returns the error about a model_type that is not supported."""
    return ValueError(f"model_type={name}: unknown architecture; supported: {', '.join(MODEL_TYPES)}")


def _from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise unknown(model_type or config.get("architectures") or "(missing)")
    if config.get("num_experts") is None:  # transformers 5 writes Qwen3-MoE's number under Mixtral's name
        config = {**config, "num_experts": config.get("num_local_experts")}
    if missing := [name for name in NEEDED[model_type] if config.get(name) is None]:
        raise ValueError(f"{', '.join(missing)}: missing; {model_type} needs them")
    fields = Fields(config)
    _check_variants(fields)
    rope_theta, rope_scaling = _rope(fields)
    num_layers, num_heads = fields.whole("num_hidden_layers"), fields.whole("num_attention_heads")
    sliding_window, full_attention_layers = _windows(fields, model_type, num_layers)
    return {
        "model_type": model_type,
        "vocab_size": fields.whole("vocab_size"),
        "hidden_size": fields.whole("hidden_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.whole("num_key_value_heads", default=num_heads),
        "head_dim": fields.whole_or_none("head_dim") or _head_dim(fields.whole("hidden_size"), num_heads),
        "intermediate_size": fields.whole("intermediate_size"),
        "max_position_embeddings": fields.whole("max_position_embeddings"),
        "rms_norm_eps": _number(fields, "rms_norm_eps"),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
        "qkv_bias": model_type == "qwen2",
        "qk_norm": model_type in ("qwen3", "qwen3_moe"),
        "sliding_window": sliding_window,
        "full_attention_layers": full_attention_layers,
        "dtype": _dtype(fields),
        "packed": PackedFormat.from_config(fields.value("quantization_config")),
        "bos_token_id": fields.value("bos_token_id"),
        "eos_token_ids": _token_ids(fields, "eos_token_id"),
        **(_experts(fields) if model_type == "qwen3_moe" else {}),
    }


def _check_variants(fields: Fields) -> None:
    if fields.value("hidden_act") not in (None, "silu"):
        raise wrong("hidden_act", fields.value("hidden_act"), "only silu is computed")
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, default=False):
            raise wrong(name, True, "biases are computed on Qwen2's query, key and value projections only")
    if fields.value("partial_rotary_factor") not in (None, 1, 1.0):
        raise wrong("partial_rotary_factor", fields.value("partial_rotary_factor"), "whole heads are rotated")


def _head_dim(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size={hidden_size}: must be a multiple of num_attention_heads={num_heads}")
    return hidden_size // num_heads


def _number(fields: Fields, name: str) -> float:
    value = fields.value(name)
    if not is_finite(value):
        raise wrong(name, value, "must be a number")
    return float(value)


def _rope(fields: Fields) -> tuple[float, dict[str, Any] | None]:
    """Returns theta and scaling: old files have rope_theta and rope_scaling, new ones rope_parameters."""
    name = "rope_parameters" if fields.value("rope_parameters") else "rope_scaling"
    given = fields.value(name) or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise wrong(name, given, "must be one object of numbers")
    scaling = dict(given)
    theta = scaling.pop("rope_theta", None)
    if theta is None:
        theta = fields.value("rope_theta")
    if theta is None:
        theta = DEFAULT_ROPE_THETA
    if not is_finite(theta):
        raise wrong("rope_theta", theta, "must be a number")
    kind = scaling.pop("rope_type", None) or scaling.get("type") or "default"
    scaling.pop("type", None)
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise wrong(name, given, "whole heads are rotated: no partial_rotary_factor")
    if kind == "default":
        return float(theta), None
    if kind not in ROPE_TYPES:
        raise wrong(name, given, f"supported rope_type: default, {', '.join(ROPE_TYPES)}")
    if kind == "yarn":
        scaling.setdefault("original_max_position_embeddings", fields.value("max_position_embeddings"))
    return float(theta), {"rope_type": kind, **scaling}


def _windows(fields: Fields, model_type: str, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Returns the sliding window and the layers without it."""
    if model_type == "llama":
        return None, ()
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


def _experts(fields: Fields) -> dict[str, Any]:
    return {
        "num_experts": fields.whole("num_experts"),
        "num_experts_per_tok": fields.whole("num_experts_per_tok"),
        "moe_intermediate_size": fields.whole("moe_intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob", default=False),
        "decoder_sparse_step": fields.whole("decoder_sparse_step", default=1),
        "mlp_only_layers": tuple(fields.wholes("mlp_only_layers")),
    }


def _dtype(fields: Fields) -> torch.dtype:
    """Returns the dtype of a config, in `dtype` or, from older transformers versions, `torch_dtype`."""
    for name in ("dtype", "torch_dtype"):
        value = fields.value(name)
        if value is not None:
            if value not in DTYPES:
                raise wrong(name, value, f"must be one of {', '.join(DTYPES)}")
            return DTYPES[value]
    return torch.bfloat16


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    value = fields.value(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_whole(token) and token >= 0 for token in ids):
        raise wrong(name, value, "must be a token id or a list of token ids")
    return tuple(ids)


def _from_gguf(file: GgufFile) -> dict[str, Any]:
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
    head_dim = get("attention.key_length") or _head_dim(get("embedding_length"), num_heads)
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
