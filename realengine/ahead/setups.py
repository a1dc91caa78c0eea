"""Models at their real sizes, and the ways to serve them that `realengine.ahead` compiles launches for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from realengine.ahead.zeros import EngineShape
from realengine.model.architecture import Architecture
from realengine.model.variants import GemmaParts, GptOssParts, LatentSizes
from realengine.settings import DTYPES, KV_DTYPES

TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]"


def _sizes(*sizes: Any, **others: Any) -> Architecture:
    """Returns a model. sizes: in the order of SIZES."""
    usual = {"rms_norm_eps": 1e-6, "rope_theta": 5e5}
    return Architecture(**{**dict(zip(SIZES, sizes, strict=True)), **usual, **others})


SIZES = [
    *("model_type", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings"),
]
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_llama = _sizes("llama", 128256, 4096, 32, 32, 8, 128, 14336, 131072, rms_norm_eps=1e-5)
_qwen3 = _sizes("qwen3", 151936, 4096, 36, 32, 8, 128, 12288, 40960, rope_theta=1e6, qk_norm=True)
_latent = LatentSizes(query_rank=None, rank=512, nope_dim=128, rope_dim=64, value_dim=128, scale=192**-0.5)
_gemma = GemmaParts(query_scale=256**-0.5, attention_softcap=50.0, logits_softcap=30.0, local_rope_theta=None)
_gpt_oss = GptOssParts(alpha=1.702, limit=7.0, is_packed=False)
_tied: dict[str, Any] = {"tie_word_embeddings": True}
MODELS = {
    "llama-3.1-8b": _llama,
    "llama-2-7b": _sizes("llama", 32000, 4096, 32, 32, 32, 128, 11008, 4096, rms_norm_eps=1e-5),
    "llama-3.2-1b": _sizes("llama", 128256, 2048, 16, 32, 8, 64, 8192, 131072, rms_norm_eps=1e-5, **_tied),
    "mistral-7b": _sizes(
        "mistral", 32000, 4096, 32, 32, 8, 128, 14336, 32768, rms_norm_eps=1e-5, sliding_window=4096
    ),
    "qwen2.5-7b": _sizes(
        "qwen2", 152064, 3584, 28, 28, 4, 128, 18944, 32768, rms_norm_eps=1e-5, qkv_bias=True
    ),
    "qwen3-0.6b": replace(
        _qwen3,
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        intermediate_size=3072,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _qwen3,
    "qwen3-30b-a3b": _sizes(
        *("qwen3_moe", 151936, 2048, 48, 32, 4, 128, 6144, 40960),
        **dict(zip(_EXPERTS, (128, 8, 768), strict=True)),
        **{"rope_theta": 1e6, "qk_norm": True, "norm_topk_prob": True},
    ),
    "deepseek-v2-lite": _sizes(
        *("deepseek_v2", 102400, 2048, 27, 16, 16, 192, 10944, 163840),
        **dict(zip(_EXPERTS, (64, 6, 1408), strict=True)),
        **{"latent": _latent, "shared_intermediate_size": 2816, "mlp_only_layers": (0,)},
    ),
    "gemma2-9b": _sizes(
        *("gemma2", 256000, 3584, 42, 16, 8, 256, 14336, 8192),
        **{"gemma": _gemma, "sliding_window": 4096, "full_attention_layers": (1,), **_tied},
    ),
    "gpt-oss-20b": _sizes(
        *("gpt_oss", 201088, 2880, 24, 64, 8, 64, 2880, 131072),
        **dict(zip(_EXPERTS, (32, 4, 2880), strict=True)),
        **{"gpt_oss": _gpt_oss, "sliding_window": 128, "full_attention_layers": (1,), "norm_topk_prob": True},
        **{"qkv_bias": True, "rms_norm_eps": 1e-5},
    ),
    "phi3-mini": _sizes(
        *("phi3", 32064, 3072, 32, 32, 32, 96, 8192, 4096),
        **{"fused_qkv": True, "fused_gate_up": True, "rms_norm_eps": 1e-5},
    ),
    "smollm2-135m": _sizes("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, rms_norm_eps=1e-5, **_tied),
}
"""Sizes of the published config.json files, without fields that reach no launch (rope scaling, token ids)."""

DRAFTERS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 8},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
    "drawn_drafts": {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    },
    "specinfer_tree": {"method": "specinfer_tree", "widths": [2, 2, 1]},
    "self_speculative": {"method": "self_speculative", "num_speculative_tokens": 4, "skipped_layers": [1]},
    "lookahead": {"method": "lookahead", "window": 15, "ngram": 5, "guesses": 15},
    "medusa": {"method": "medusa", "speculative_token_tree": TREE},
    "eagle": {"method": "eagle", "num_speculative_tokens": 4},
    "eagle_tree": {"method": "eagle", "speculative_token_tree": TREE},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
}
"""Settings of speculative_config by name, without the model that drafts."""
DRAFTS = {"llama-3.1-8b": "llama-3.2-1b", "qwen3-8b": "qwen3-0.6b", "smollm2-135m": "smollm2-135m"}
"""Draft models by target; drafters that are layers of a target have its sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A model and how it is served, with the settings of EngineSettings."""

    model: str
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    dtype: str = "bfloat16"
    world_size: int = 1
    max_rank: int = 0
    """Maximum rank of the adapters; 0: none are served."""
    drafter: str | None = None
    """What drafts, one of DRAFTERS; None: the engine does not speculate."""

    @property
    def shape(self) -> EngineShape:
        """The engine with the longest context and 256 sequences."""
        architecture, dtype = MODELS[self.model], DTYPES[self.dtype]
        return EngineShape(
            architecture=architecture,
            dtype=dtype,
            kv_dtype=KV_DTYPES.get(self.kv_cache_dtype, dtype),
            quantization=self.quantization,
            world_size=self.world_size,
            block_size=16,
            max_model_len=architecture.max_position_embeddings,
            max_num_seqs=256,
            max_num_tokens=2048,
            max_loras=8 if self.max_rank else 0,
            max_rank=self.max_rank,
        )

    @property
    def name(self) -> str:
        """The model, and the settings that differ from the defaults."""
        parts = {
            self.model: True,
            self.quantization: self.quantization is not None,
            f"kv-{self.kv_cache_dtype}": self.kv_cache_dtype != "auto",
            self.dtype: self.dtype != "bfloat16",
            f"tp{self.world_size}": self.world_size > 1,
            f"lora{self.max_rank}": self.max_rank > 0,
            self.drafter: self.drafter is not None,
        }
        return " ".join(str(part) for part, is_unusual in parts.items() if is_unusual)


SETUPS = (
    *(Setup(model=model) for model in MODELS),
    *(Setup(model="llama-3.1-8b", quantization=name) for name in ("w4a16", "w8a16", "int8", "fp8")),
    *(Setup(model="llama-3.1-8b", kv_cache_dtype=name) for name in KV_DTYPES),
    *(Setup(model="llama-3.1-8b", max_rank=rank) for rank in (16, 64)),
    Setup(model="llama-3.1-8b", world_size=2),
    *(Setup(model="mistral-7b", kv_cache_dtype=name) for name in ("int8", "int4")),
    Setup(model="qwen2.5-7b", quantization="w4a16"),
    Setup(model="qwen2.5-7b", quantization="w8a16"),
    Setup(model="qwen2.5-7b", quantization="fp8"),
    *(Setup(model="qwen3-0.6b", dtype=name) for name in ("float16", "float32")),
    Setup(model="qwen3-30b-a3b", quantization="w8a16"),
    Setup(model="qwen3-30b-a3b", world_size=2),
    Setup(model="gpt-oss-20b", quantization="mxfp4"),
    Setup(model="deepseek-v2-lite", quantization="w8a16"),
    Setup(model="deepseek-v2-lite", world_size=2),
    Setup(model="deepseek-v2-lite", drafter="ngram"),
    Setup(model="smollm2-135m", quantization="w4a16"),
    *(Setup(model="smollm2-135m", kv_cache_dtype=name) for name in ("int8", "int4")),
    *(
        Setup(model="llama-3.1-8b", drafter=name)
        for name in ("ngram", "draft_model", "drawn_drafts", "eagle", "eagle_tree", "eagle3", "mtp")
    ),
    *(Setup(model="llama-3.1-8b", drafter="eagle_tree", kv_cache_dtype=name) for name in KV_DTYPES),
    *(Setup(model="llama-3.1-8b", drafter="draft_model", quantization=name) for name in ("w4a16", "fp8")),
    Setup(model="llama-3.1-8b", drafter="draft_model", world_size=2),
    Setup(model="mistral-7b", drafter="eagle_tree"),
    Setup(model="qwen2.5-7b", drafter="ngram"),
    *(Setup(model="qwen3-8b", drafter=name) for name in ("draft_model", "eagle3")),
    Setup(model="qwen3-30b-a3b", drafter="mtp"),
    *(
        Setup(model="smollm2-135m", drafter=name)
        for name in ("draft_model", "specinfer_tree", "self_speculative", "lookahead", "medusa")
    ),
)
