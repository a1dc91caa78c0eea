"""Models at their real sizes, and the ways to serve them that `realengine.ahead` compiles launches for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from realengine.model.architecture import Architecture
from realengine.model.variants import GemmaParts, GptOssParts, LatentSizes
from realengine.settings import KV_DTYPES

TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]"

_llama = Architecture(
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
)
_qwen3 = replace(
    _llama,
    model_type="qwen3",
    vocab_size=151936,
    num_layers=36,
    intermediate_size=12288,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    qk_norm=True,
)
MODELS = {
    "llama-3.1-8b": _llama,
    "llama-2-7b": replace(
        _llama, vocab_size=32000, num_kv_heads=32, intermediate_size=11008, max_position_embeddings=4096
    ),
    "llama-3.2-1b": replace(
        _llama,
        hidden_size=2048,
        num_layers=16,
        head_dim=64,
        intermediate_size=8192,
        tie_word_embeddings=True,
    ),
    "mistral-7b": replace(
        _llama, model_type="mistral", vocab_size=32000, max_position_embeddings=32768, sliding_window=4096
    ),
    "qwen2.5-7b": replace(
        _llama,
        model_type="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        intermediate_size=18944,
        max_position_embeddings=32768,
        qkv_bias=True,
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
    "qwen3-30b-a3b": replace(
        _qwen3,
        model_type="qwen3_moe",
        hidden_size=2048,
        num_layers=48,
        num_kv_heads=4,
        intermediate_size=6144,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "deepseek-v2-lite": replace(
        _llama,
        model_type="deepseek_v2",
        vocab_size=102400,
        hidden_size=2048,
        num_layers=27,
        num_heads=16,
        num_kv_heads=16,
        head_dim=192,
        intermediate_size=10944,
        max_position_embeddings=163840,
        rms_norm_eps=1e-6,
        latent=LatentSizes(
            query_rank=None, rank=512, nope_dim=128, rope_dim=64, value_dim=128, scale=192**-0.5
        ),
        num_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        shared_intermediate_size=2816,
        mlp_only_layers=(0,),
    ),
    "gemma2-9b": replace(
        _llama,
        model_type="gemma2",
        vocab_size=256000,
        hidden_size=3584,
        num_layers=42,
        num_heads=16,
        head_dim=256,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        sliding_window=4096,
        full_attention_layers=(1,),
        gemma=GemmaParts(
            query_scale=256**-0.5, attention_softcap=50.0, logits_softcap=30.0, local_rope_theta=None
        ),
    ),
    "gpt-oss-20b": replace(
        _llama,
        model_type="gpt_oss",
        vocab_size=201088,
        hidden_size=2880,
        num_layers=24,
        num_heads=64,
        head_dim=64,
        intermediate_size=2880,
        qkv_bias=True,
        sliding_window=128,
        full_attention_layers=(1,),
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=2880,
        norm_topk_prob=True,
        gpt_oss=GptOssParts(alpha=1.702, limit=7.0, is_packed=False),
    ),
    "phi3-mini": replace(
        _llama,
        model_type="phi3",
        vocab_size=32064,
        hidden_size=3072,
        num_kv_heads=32,
        head_dim=96,
        intermediate_size=8192,
        max_position_embeddings=4096,
        fused_qkv=True,
        fused_gate_up=True,
    ),
    "smollm2-135m": replace(
        _llama,
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
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
