"""The computation of a decoder-only checkpoint: sizes and switches from config.json or a GGUF file.

Llama 2 and 3.x and SmolLM2 (all `llama`), Mistral, Qwen2 and 2.5, Qwen3, Qwen3-MoE: pre-norm with RMSNorm,
rotary positions in the neox layout (pairs i, i + head_dim / 2), grouped-query attention, SwiGLU. What other
models have instead is described by the fields from `latent` on; `realengine.model.families` reads them. A
model with another variant is rejected, never computed wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hwmodels.checks import check_finite, check_whole
from hwmodels.hf.config import read_hf_config
from realengine.model.config_fields import DEFAULT_ROPE_THETA, unknown
from realengine.model.config_json import FAMILIES, fields_of_hf
from realengine.model.gguf_metadata import fields_of_gguf
from realengine.model.variants import GREEDY, ExpertRouting, GemmaParts, GptOssParts, LatentSizes
from realengine.weights.gguf import GgufFile
from realengine.weights.quantized_formats import PackedFormat

MODEL_TYPES = tuple(FAMILIES)


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
    latent: LatentSizes | None = None
    """Sizes of multi-head latent attention; None: grouped-query attention."""
    routing: ExpertRouting = GREEDY
    """How a token's experts are chosen and weighed, besides norm_topk_prob."""
    shared_intermediate_size: int = 0
    """Size of the MLP beside the experts of a layer, which every token uses; 0: there is none."""
    rotary_dims: int | None = None
    """Numbers of a head that are rotated, the first ones; None: all."""
    interleaved_rope: bool = False
    """Whether neighbouring numbers are rotated together (GLM-4), not those half a head apart."""
    alibi: bool = False
    """Whether attention has linear biases instead of rotary positions (Baichuan-13B)."""
    normalised_head: bool = False
    """Whether each row of the LM head is divided by its norm (Baichuan 2)."""
    fused_qkv: bool = False
    """Whether the checkpoint has queries, keys and values in one tensor (Phi-3, Baichuan)."""
    fused_gate_up: bool = False
    """Whether the checkpoint has gate and up in one tensor (Phi-3, GLM-4)."""
    gemma: GemmaParts | None = None
    """Parts of Gemma 2 and 3; None: none of them."""
    gpt_oss: GptOssParts | None = None
    """Parts of gpt-oss; None: none of them."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.model_type not in MODEL_TYPES:
            raise unknown(self.model_type, MODEL_TYPES)
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
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dims={self.rotary_dims}: must be even, and at most head_dim")
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
            return cls(**fields_of_hf(source))
        file, config = read_hf_config(source)
        try:
            return cls(**fields_of_hf(config))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Architecture:
        """Reads the metadata of a GGUF file. The dtype is bf16: the stored types are dequantised."""
        try:
            return cls(**fields_of_gguf(file))
        except ValueError as error:
            raise ValueError(f"{file.path}: {error}") from None

    @property
    def value_dim(self) -> int:
        """Numbers of a head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        if self.latent is not None:
            return self.latent.rope_dim
        return self.rotary_dims or self.head_dim

    @property
    def is_plain(self) -> bool:
        """True if the layers have Llama's parts only, as LoRA adapters and layers that draft need."""
        others = (self.latent, self.gemma, self.gpt_oss)
        return others == (None, None, None) and not (self.fused_qkv or self.fused_gate_up)

    def has_experts(self, layer: int) -> bool:
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    def window(self, layer: int) -> int | None:
        """Returns the number of tokens that a query of this layer attends to, itself included; None: all."""
        return None if layer in self.full_attention_layers else self.sliding_window
