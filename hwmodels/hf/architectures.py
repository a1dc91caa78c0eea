"""The architectures that are known: which of our parts each is made of, and what its own fields mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hwmodels.hf import attention, mlp
from hwmodels.hf.fields import Fields
from hwmodels.model.attention import Attention
from hwmodels.model.mlp import Mlp

REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DEEPSEEK = (*LATENT, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
QWEN_MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
LOCAL_EXPERTS = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
LINEAR = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """How to read one kind of config.json."""

    attention: Callable[[Fields], list[Attention]]
    """Of each layer."""
    mlp: Callable[[Fields], list[Mlp]] = mlp.dense_mlp
    needs: tuple[str, ...] = ("intermediate_size",)
    """Fields besides REQUIRED that must be there."""
    num_norms: int = 2
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers' configuration class assumes where published files leave a field out."""
    draft_layers: tuple[str, ...] = ()
    """Fields that hold the number of MTP layers."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Field of a part that is not priced -> the note that says so."""


DEEPSEEK_V3 = Architecture(
    attention=attention.latent_attention,
    mlp=mlp.deepseek_mlp,
    needs=DEEPSEEK,
    draft_layers=("num_nextn_predict_layers",),
)
QWEN3_5_MOE = Architecture(
    attention=attention.hybrid_attention,
    mlp=mlp.qwen_moe_mlp,
    needs=(*QWEN_MOE, *LINEAR),
    draft_layers=("mtp_num_hidden_layers",),
    left_out={"mtp_use_dedicated_embeddings": "embedding table of the MTP layer ignored"},
)
GEMMA3 = Architecture(
    attention=attention.gemma3_attention,
    num_norms=4,
    defaults={
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
)
PER_LAYER_EMBEDDINGS = "per-layer embeddings, AltUp and LAuReL ignored: few FLOPs, but weights of their own"
GEMMA3N = Architecture(
    attention=attention.gemma3n_attention,
    mlp=mlp.gemma3n_mlp,
    num_norms=4,
    defaults={
        "vocab_size": 262400,
        "max_position_embeddings": 32768,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
        "tie_word_embeddings": True,
    },
    left_out={
        "hidden_size_per_layer_input": PER_LAYER_EMBEDDINGS,
        "vocab_size_per_layer_input": PER_LAYER_EMBEDDINGS,
        "laurel_rank": PER_LAYER_EMBEDDINGS,
        "altup_num_inputs": PER_LAYER_EMBEDDINGS,
        "altup_active_idx": PER_LAYER_EMBEDDINGS,
        "altup_coef_clip": PER_LAYER_EMBEDDINGS,
        "altup_correct_scale": PER_LAYER_EMBEDDINGS,
        "altup_lr_multiplier": PER_LAYER_EMBEDDINGS,
    },
)
LLAMA4 = Architecture(
    attention=attention.llama4_attention,
    mlp=mlp.llama4_mlp,
    defaults={"attention_chunk_size": 8192},
)
QWEN2 = Architecture(attention=attention.qwen2_attention)
QWEN3 = Architecture(attention=attention.qwen3_attention)
QWEN3_MOE = Architecture(attention=attention.qwen3_attention, mlp=mlp.qwen_moe_mlp, needs=QWEN_MOE)
MISTRAL = Architecture(attention=attention.llama_attention)

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(attention=attention.llama_attention),
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": Architecture(
        attention=attention.llama_attention, mlp=mlp.mixtral_mlp, needs=LOCAL_EXPERTS
    ),
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": Architecture(
        attention=attention.qwen2_attention, mlp=mlp.qwen_moe_mlp, needs=QWEN_MOE
    ),
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen3NextForCausalLM": QWEN3_5_MOE,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "DeepseekV2ForCausalLM": DEEPSEEK_V3,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": DEEPSEEK_V3,
    "Glm4MoeForCausalLM": Architecture(
        attention=attention.glm4_moe_attention,
        mlp=mlp.deepseek_mlp,
        needs=("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
        draft_layers=("num_nextn_predict_layers",),
    ),
    "GlmMoeDsaForCausalLM": DEEPSEEK_V3,
    "GemmaForCausalLM": Architecture(
        attention=attention.llama_attention, defaults={"tie_word_embeddings": True}
    ),
    "Gemma2ForCausalLM": Architecture(
        attention=attention.gemma2_attention, num_norms=4, defaults={"tie_word_embeddings": True}
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3nForCausalLM": GEMMA3N,
    "Phi3ForCausalLM": Architecture(attention=attention.phi3_attention),
    "GptOssForCausalLM": Architecture(
        attention=attention.gpt_oss_attention, mlp=mlp.gpt_oss_mlp, needs=LOCAL_EXPERTS
    ),
    "Llama4ForCausalLM": LLAMA4,
    "MiniMaxM2ForCausalLM": Architecture(
        attention=attention.minimax_m2_attention,
        mlp=mlp.minimax_m2_mlp,
        needs=LOCAL_EXPERTS,
        draft_layers=("num_mtp_modules",),
        left_out={"use_mtp": ""},
    ),
}

WRAPPERS: Mapping[str, Architecture] = {
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Gemma3nForConditionalGeneration": GEMMA3N,
    "KimiK25ForConditionalGeneration": DEEPSEEK_V3,
    "Llama4ForConditionalGeneration": LLAMA4,
    "Mistral3ForConditionalGeneration": MISTRAL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2,
    "Qwen3VLForConditionalGeneration": QWEN3,
    "Qwen3VLMoeForConditionalGeneration": QWEN3_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE,
}
"""Models that also see or hear; their language model is in text_config. The rest is not priced."""

KNOWN = (*ARCHITECTURES, *WRAPPERS)
