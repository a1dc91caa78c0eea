"""Known architectures: the layers of each one, and the meaning of its fields.

A new architecture is an entry of `ARCHITECTURES` and, unless one of the functions below fits, a function that
reads the attention of each of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hwmodels.hf import hybrids, layers
from hwmodels.hf.fields import Fields
from hwmodels.hf.usual import (
    big_code_names,
    chatglm_names,
    cohere2_moe_names,
    dbrx_names,
    dots3_names,
    falcon_names,
    gated_norms,
    gemma3n_tables,
    hyper_connections,
    inkling_names,
    learned_positions,
    mpt_names,
    muse_names,
    nemotron_h_names,
    no_other_weights,
    per_layer_embeddings,
    qwen_names,
    unknown_attention,
    usual_attention,
    usual_mlp,
    v4_names,
    with_names,
    with_usual_names,
)
from hwmodels.model import Mlp, OtherWeights
from hwmodels.model.attention import Attention

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
    """Describes how to read one kind of config.json."""

    attention: Callable[[Fields], list[Attention]]
    """Returns the attention of each layer."""
    mlp: Callable[[Fields], list[Mlp]] = layers.dense_mlp
    needs: tuple[str, ...] = ("intermediate_size",)
    """Fields that must be present besides REQUIRED."""
    num_norms: int = 2
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers' configuration class or vLLM's model assumes for missing fields."""
    mtp_layers: tuple[str, ...] = ()
    """Fields that hold the number of MTP layers."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Fields of parts that are not priced, each with a note about it."""
    no_effect: tuple[str, ...] = ()
    """Fields of its class that affect no price, such as constant behaviour."""
    renamed: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """Returns the fields under the names that attention and mlp read."""
    other_weights: Callable[[Fields], tuple[OtherWeights, ...]] = no_other_weights
    """Returns weights outside the layers, apart from vocabulary tables."""
    mtp_layer: Callable[[Sequence[Attention], Sequence[Mlp]], tuple[Attention, Mlp]] | None = None
    """Returns the parts of an MTP module's layer from those of all layers; None: those of the last block."""


DEEPSEEK_V3 = Architecture(
    attention=layers.latent_attention,
    mlp=layers.deepseek_mlp,
    needs=DEEPSEEK,
    mtp_layers=("num_nextn_predict_layers",),
    renamed=with_names("n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
)
QWEN3_5_MOE = Architecture(
    attention=layers.hybrid_attention,
    mlp=layers.qwen_moe_mlp,
    needs=(*QWEN_MOE, *LINEAR),
    mtp_layers=("mtp_num_hidden_layers",),
    left_out={"mtp_use_dedicated_embeddings": "embedding table of the MTP layer ignored"},
    renamed=with_names("num_experts"),
)
QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    mtp_layers=("num_nextn_predict_layers",),
    defaults={"num_nextn_predict_layers": 1},  # vLLM's Qwen3NextMTP
    left_out={},
)
GEMMA3 = Architecture(
    attention=layers.gemma3_attention,
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
GEMMA3N = Architecture(
    attention=layers.gemma3n_attention,
    mlp=layers.gemma3n_mlp,
    num_norms=4,
    defaults={
        "vocab_size": 262400,
        "max_position_embeddings": 32768,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "laurel_rank": 64,
        "altup_num_inputs": 4,
        "tie_word_embeddings": True,
    },
    other_weights=gemma3n_tables,
)
LLAMA4 = Architecture(
    attention=layers.llama4_attention,
    mlp=layers.llama4_mlp,
    defaults={"attention_chunk_size": 8192},
)
QK_NORM = ("use_qk_norm", "qk_norm", "qk_layernorm")
QWEN2 = Architecture(attention=layers.qwen2_attention)
QWEN3 = Architecture(attention=layers.qwen3_attention, no_effect=QK_NORM)
QWEN3_MOE = Architecture(
    attention=layers.qwen3_attention,
    mlp=layers.qwen_moe_mlp,
    needs=QWEN_MOE,
    no_effect=QK_NORM,
    renamed=with_names("num_experts"),
)
QWEN3_5 = Architecture(
    attention=layers.hybrid_attention,
    needs=("intermediate_size", *LINEAR),
    mtp_layers=("mtp_num_hidden_layers",),
    left_out={"mtp_use_dedicated_embeddings": "embedding table of the MTP layer ignored"},
    no_effect=("mlp_only_layers",),
)
MISTRAL = Architecture(attention=layers.llama_attention)


def usual(
    *,
    mlps: Callable[[Fields], list[Mlp]] = usual_mlp,
    needs: tuple[str, ...] = (),
    renamed: Callable[[Mapping[str, Any]], dict[str, Any]] = with_usual_names,
    mtp_layers: tuple[str, ...] = ("num_nextn_predict_layers",),
    attention: Callable[[Fields], list[Attention]] = usual_attention,
    **others: Any,
) -> Architecture:
    """Returns an architecture whose fields have their usual meanings, under any usual name."""
    return Architecture(
        attention=attention, mlp=mlps, needs=needs, renamed=renamed, mtp_layers=mtp_layers, **others
    )


USUAL = usual()
TIED = {"tie_word_embeddings": True}
NORMED = partial(usual_attention, qk_norm=True)
NORMED_OVER_HEADS = partial(usual_attention, qk_norm=True, qk_norm_joins_heads=True)
BIASED = partial(usual_attention, qkv_bias=True, o_bias=True)
UNGATED = partial(usual_mlp, gated=False)
GPT = partial(usual_mlp, gated=False, bias=True, factor=4)
biased = partial(usual, attention=BIASED, mlps=GPT)

GEMMA4 = Architecture(
    attention=hybrids.gemma4_attention,
    mlp=hybrids.gemma4_mlp,
    num_norms=4,
    renamed=with_usual_names,
    defaults={"sliding_window": 512, "tie_word_embeddings": True},
    other_weights=per_layer_embeddings,
)
DEEPSEEK_V4 = Architecture(
    attention=hybrids.compressed_attention,
    mlp=layers.deepseek_mlp,
    needs=("head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "sliding_window", *DEEPSEEK[-3:]),
    mtp_layers=("num_nextn_predict_layers",),
    mtp_layer=hybrids.v4_mtp,
    renamed=v4_names,
    no_effect=("expert_dtype",),  # a storage format, which the reader of quantised checkpoints knows
)
KIMI_LINEAR = usual(
    attention=hybrids.kimi_linear_attention, mlps=partial(usual_mlp, router_bias=True), needs=LATENT
)
BAILING_V3 = usual(
    attention=hybrids.bailing_hybrid_attention,
    mlps=partial(usual_mlp, router_bias=True),
    needs=LATENT,
    mtp_layer=hybrids.latent_mtp,
    no_effect=("no_kda_lora", "qk_head_dim"),
)
STREAMS = {"hc_mult": "hyper-connections counted in memory, not in time"}
GLM5_NEXT = replace(
    DEEPSEEK_V3,
    attention=hybrids.glm5_next_attention,
    other_weights=hyper_connections,
    left_out=STREAMS,
    mtp_layer=hybrids.latent_mtp,
)
HY_V4 = replace(
    DEEPSEEK_V3,
    attention=partial(layers.latent_attention, output_gate=True),
    other_weights=partial(hyper_connections, mixes=False),
    left_out=STREAMS,
    no_effect=("learnable_sink_init",),
)
DOTS3 = usual(
    attention=hybrids.dots3_attention,
    mlps=partial(usual_mlp, router_bias=True),
    renamed=dots3_names,
    needs=LATENT,
)
MISTRAL_LARGE4 = replace(DEEPSEEK_V3, attention=hybrids.mistral_large4_attention)
BESIDE_LAYERS = {
    "d_rel": "relative positions and short convolutions counted in memory, not in time; the convolutions' "
    "states, as large as the KV of about ten tokens, not counted"
}
INKLING = usual(
    attention=hybrids.inkling_attention,
    mlps=partial(usual_mlp, router_bias=True),
    renamed=inkling_names,
    other_weights=hybrids.inkling_weights,
    left_out=BESIDE_LAYERS,
    no_effect=(
        "unpadded_vocab_size",
        "local_layer_ids",
        "mtp_local_layer_ids",
        "log_scaling_n_floor",
        "mtp_hidden_states_first",
        "chain_hidden_post_norm",
        "shared_expert_sink",
        "rms_norm_eps_moe_gate",
    ),
)
INKLING2 = replace(
    INKLING,
    attention=partial(hybrids.inkling_attention, output_gate=True),
    other_weights=partial(hybrids.inkling_weights, second=True),
    left_out=BESIDE_LAYERS
    | {"n_layers_per_attn_res_block": "attention to the outputs of earlier blocks of layers not in time"},
)
MUSE = usual(
    attention=partial(usual_attention, qk_norm=True, output_gate=True),
    mlps=partial(usual_mlp, gated=True),
    renamed=muse_names,
    num_norms=4,
    no_effect=("layer_rope_theta",),
)
LFM3 = usual(attention=hybrids.lfm3_attention, num_norms=4, defaults=TIED, no_effect=("use_sandwich_norm",))
MINIMAX_M3 = usual(
    attention=hybrids.minimax_m3_attention,
    no_effect=("qk_norm_type", "num_mtp_modules"),
    mtp_layers=("num_nextn_predict_layers",),
)
NEMOTRON_H = usual(
    attention=hybrids.nemotron_h_attention,
    mlps=hybrids.nemotron_h_mlp,
    renamed=nemotron_h_names,
    num_norms=1,
    mtp_layer=hybrids.nemotron_h_mtp,
)
STEP3_5 = usual(attention=hybrids.step3_attention, mlps=partial(usual_mlp, router_bias=True))
STEP3_7 = replace(
    STEP3_5,
    attention=partial(hybrids.step3_attention, head_gate=True),
    no_effect=("mtp_layer_types", "mtp_mlp_layer_types"),
)
GRANITE_MOE = usual()
LIGHTNING = usual(attention=hybrids.lightning_attention, no_effect=("postnorm",))
MIMO_V2 = usual(
    attention=hybrids.mimo_v2_attention,
    mlps=partial(usual_mlp, router_bias=True),
    defaults={"num_nextn_predict_layers": 3},  # MiMo-V2-Flash's report, section 2; vLLM runs only the first
    mtp_layer=hybrids.dense_mtp,
    no_effect=("attention_projection_layout",),
)
GLM4 = usual(attention=partial(usual_attention, o_bias=False), num_norms=4)
GLM4_MOE = Architecture(
    attention=layers.glm4_moe_attention,
    mlp=layers.deepseek_mlp,
    needs=("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    mtp_layers=("num_nextn_predict_layers",),
)
BAICHUAN = usual()
MPT = usual(
    mlps=UNGATED,
    renamed=mpt_names,
    defaults=TIED,
    no_effect=("no_bias", "norm_type", "embedding_fraction"),
)
FALCON = usual(
    mlps=partial(usual_mlp, gated=False, factor=4),
    renamed=falcon_names,
    defaults={"max_position_embeddings": 2048, "tie_word_embeddings": True},
    no_effect=("alibi", "parallel_attn", "num_ln_in_parallel_attn"),
)
CHATGLM = usual(renamed=chatglm_names, no_effect=("add_bias_linear", "pre_seq_len", "prefix_projection"))
GROK = usual(num_norms=4, defaults=TIED, no_effect=("attn_logit_softcapping",))
HUNYUAN = ("cla_share_factor", "use_mixed_mlp_moe", "dense_list", "class_num", "moe_layer_num_skipped")
LONGCAT = usual(
    attention=hybrids.longcat_attention,
    mlps=hybrids.longcat_mlp,
    needs=(*LATENT, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size"),
    defaults={"num_nextn_predict_layers": 1},  # vLLM's LongCatFlashMTP
    mtp_layer=hybrids.dense_mtp,
)

ERNIE_VL = usual(
    mlps=hybrids.ernie_vl_mlp,
    other_weights=hybrids.ernie_vl_experts,
    defaults=TIED,
    no_effect=("moe_norm_min", "moe_use_hard_gate", "moe_dense_experts_token_type_id", "moe_group"),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(attention=layers.llama_attention),
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": Architecture(
        attention=layers.llama_attention, mlp=layers.mixtral_mlp, needs=LOCAL_EXPERTS
    ),
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": Architecture(
        attention=layers.qwen2_attention,
        mlp=layers.qwen_moe_mlp,
        needs=QWEN_MOE,
        renamed=with_names("num_experts"),
    ),
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "DeepseekV2ForCausalLM": DEEPSEEK_V3,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": DEEPSEEK_V3,
    "DeepseekV4ForCausalLM": DEEPSEEK_V4,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "GlmMoeDsaForCausalLM": DEEPSEEK_V3,
    "GemmaForCausalLM": Architecture(
        attention=layers.llama_attention, defaults={"tie_word_embeddings": True}
    ),
    "Gemma2ForCausalLM": Architecture(
        attention=layers.gemma2_attention, num_norms=4, defaults={"tie_word_embeddings": True}
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3nForCausalLM": GEMMA3N,
    "Phi3ForCausalLM": Architecture(attention=layers.phi3_attention),
    "GptOssForCausalLM": Architecture(
        attention=layers.gpt_oss_attention, mlp=layers.gpt_oss_mlp, needs=LOCAL_EXPERTS
    ),
    "Llama4ForCausalLM": LLAMA4,
    "MiniMaxM2ForCausalLM": Architecture(
        attention=layers.minimax_m2_attention,
        mlp=layers.minimax_m2_mlp,
        needs=LOCAL_EXPERTS,
        mtp_layers=("num_mtp_modules",),
        left_out={"use_mtp": ""},
    ),
    "MiniMaxM3ForCausalLM": MINIMAX_M3,
    "MiniMaxM3SparseForCausalLM": MINIMAX_M3,
    "MiniMaxM1ForCausalLM": LIGHTNING,
    "MiniMaxText01ForCausalLM": LIGHTNING,
    "MiniMaxForCausalLM": LIGHTNING,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "KimiLinearForCausalLM": KIMI_LINEAR,
    "LagunaForCausalLM": usual(
        attention=hybrids.laguna_attention,
        mlps=partial(usual_mlp, router_bias=True),
        no_effect=("moe_routed_scaling_factor", "moe_router_logit_softcapping"),
    ),
    "Glm5NextForCausalLM": GLM5_NEXT,
    "HYV4ForCausalLM": HY_V4,
    "Dots3NoteForCausalLM": DOTS3,
    "AXK2ForCausalLM": replace(
        DEEPSEEK_V3,
        attention=partial(layers.latent_attention, query_gate=True),
        needs=(*DEEPSEEK, "q_lora_rank", "gated_norm_rank"),
        other_weights=gated_norms,
        left_out={"gated_norm_rank": "gates of norms counted in memory, not in time"},
    ),
    "InklingForCausalLM": INKLING,
    "Inkling2ForCausalLM": INKLING2,
    "MuseGlimmerForCausalLM": MUSE,
    "BailingHybridForCausalLM": BAILING_V3,
    "BailingMoeV3ForCausalLM": BAILING_V3,
    "Cohere2MoeForCausalLM": usual(
        attention=partial(usual_attention, full_every=4),
        renamed=cohere2_moe_names,
        num_norms=1,
        defaults=TIED,
        no_effect=(
            "expert_selection_fn",
            "prefix_dense_sliding_window_pattern",
            "shared_expert_combination_strategy",
            "sliding_window_pattern",
        ),
    ),
    "MiniMaxM3VLForCausalLM": MINIMAX_M3,
    "OlmoHybridForCausalLM": usual(attention=hybrids.olmo_hybrid_attention, needs=LINEAR),
    "Lfm3ForCausalLM": LFM3,
    "BeamForCausalLM": usual(
        attention=partial(NORMED, output_gate=True),
        mlps=partial(usual_mlp, router_bias=True),
        num_norms=4,
    ),
    "LaraMiniForCausalLM": usual(attention=hybrids.lara_attention, needs=LINEAR, defaults=TIED),
    "Glm4MoeLiteForCausalLM": DEEPSEEK_V3,
    "MistralLarge3ForCausalLM": DEEPSEEK_V3,
    "LongcatFlashForCausalLM": LONGCAT,
    "Gemma4ForCausalLM": GEMMA4,
    "NemotronHForCausalLM": NEMOTRON_H,
    "JambaForCausalLM": usual(attention=hybrids.jamba_attention, mlps=hybrids.jamba_mlp),
    "BambaForCausalLM": usual(attention=hybrids.bamba_attention),
    "FalconH1ForCausalLM": usual(attention=hybrids.falcon_h1_attention),
    "GraniteMoeHybridForCausalLM": usual(
        attention=hybrids.granite_hybrid_attention, mlps=hybrids.granite_hybrid_mlp
    ),
    "Lfm2ForCausalLM": usual(attention=hybrids.lfm2_attention, mlps=hybrids.lfm2_mlp, defaults=TIED),
    "Lfm2MoeForCausalLM": usual(attention=hybrids.lfm2_attention, mlps=hybrids.lfm2_mlp, defaults=TIED),
    "BailingMoeV2_5ForCausalLM": usual(
        attention=hybrids.bailing_linear_attention, mlps=partial(usual_mlp, router_bias=True)
    ),
    "BailingMoeLinearV2ForCausalLM": usual(
        attention=hybrids.bailing_linear_attention, mlps=partial(usual_mlp, router_bias=True)
    ),
    "DeciLMForCausalLM": Architecture(
        attention=hybrids.deci_attention, mlp=hybrids.deci_mlp, needs=("block_configs",)
    ),
    "MiMoForCausalLM": Architecture(
        attention=layers.qwen2_attention, mtp_layers=("num_nextn_predict_layers",)
    ),
    "MiMoV2FlashForCausalLM": MIMO_V2,
    "MiMoV2ForCausalLM": MIMO_V2,
    "Step3p5ForCausalLM": STEP3_5,
    "Step3p7FlashForCausalLM": STEP3_5,
    "Step3p7ForCausalLM": STEP3_5,
    "AfmoeForCausalLM": usual(
        attention=partial(usual_attention, qk_norm=True, output_gate=True, full_every=4),
        mlps=partial(usual_mlp, router_bias=True),
        num_norms=4,
        no_effect=("global_attn_every_n_layers", "mup_enabled"),
    ),
    "ApertusForCausalLM": usual(attention=NORMED, mlps=UNGATED),
    "AquilaForCausalLM": USUAL,
    "AquilaModel": USUAL,
    "ArceeForCausalLM": usual(mlps=UNGATED),
    "BaiChuanForCausalLM": BAICHUAN,
    "BaichuanForCausalLM": BAICHUAN,
    "BailingMoeForCausalLM": USUAL,
    "BailingMoeV2ForCausalLM": usual(attention=NORMED, mlps=partial(usual_mlp, router_bias=True)),
    "BitNetForCausalLM": usual(mlps=partial(usual_mlp, gated=True)),
    "BloomForCausalLM": biased(defaults={"max_position_embeddings": 2048, **TIED}),
    "ChatGLMForConditionalGeneration": CHATGLM,
    "ChatGLMModel": CHATGLM,
    "CohereForCausalLM": usual(num_norms=1, defaults=TIED),
    "Cohere2ForCausalLM": usual(
        attention=partial(usual_attention, full_every=4),
        num_norms=1,
        defaults=TIED,
        no_effect=("layer_switch",),
    ),
    "CodeGenForCausalLM": usual(mlps=GPT, num_norms=1),
    "CwmForCausalLM": USUAL,
    "DbrxForCausalLM": usual(renamed=dbrx_names),
    "DeepseekForCausalLM": USUAL,
    "Dots1ForCausalLM": usual(attention=NORMED, mlps=partial(usual_mlp, router_bias=True)),
    "Ernie4_5ForCausalLM": usual(defaults=TIED),
    "Ernie4_5_ForCausalLM": usual(defaults=TIED),
    "Ernie4_5_MoeForCausalLM": usual(mlps=partial(usual_mlp, router_bias=True), defaults=TIED),
    "Ernie4_5_VLMoeForConditionalGeneration": ERNIE_VL,
    "Ernie4_5_VLMoeForCausalLM": ERNIE_VL,
    "ExaoneForCausalLM": usual(mlps=partial(usual_mlp, gated=True)),
    "Exaone4ForCausalLM": usual(
        attention=partial(usual_attention, qk_norm=True, full_every=4), no_effect=("mtp_share_layers",)
    ),
    "ExaoneMoEForCausalLM": usual(
        attention=partial(usual_attention, qk_norm=True, full_every=4),
        mlps=partial(usual_mlp, router_bias=True),
        no_effect=("is_moe_layer",),
    ),
    "FalconForCausalLM": FALCON,
    "RWForCausalLM": FALCON,
    "GlmForCausalLM": usual(attention=partial(usual_attention, o_bias=False)),
    "Glm4ForCausalLM": GLM4,
    "GPT2LMHeadModel": biased(defaults=TIED, other_weights=learned_positions),
    "GPTBigCodeForCausalLM": biased(renamed=big_code_names, defaults=TIED, other_weights=learned_positions),
    "GPTJForCausalLM": usual(mlps=GPT, num_norms=1),
    "GPTNeoXForCausalLM": biased(),
    "GraniteForCausalLM": USUAL,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE,
    "Grok1ForCausalLM": GROK,
    "Grok1ModelForCausalLM": GROK,
    "HYV3ForCausalLM": usual(
        attention=NORMED,
        mlps=partial(usual_mlp, router_bias=True),
        no_effect=("enable_moe_fp32_combine", "enable_lm_head_fp32", "enable_attention_fp32_softmax"),
    ),
    "HunYuanDenseV1ForCausalLM": usual(attention=NORMED, no_effect=HUNYUAN),
    "HunYuanMoEV1ForCausalLM": usual(attention=NORMED, no_effect=HUNYUAN),
    "InternLMForCausalLM": USUAL,
    "InternLM2ForCausalLM": USUAL,
    "InternLM3ForCausalLM": USUAL,
    "MiniCPMForCausalLM": usual(defaults=TIED),
    "MiniCPM3ForCausalLM": usual(needs=LATENT),
    "Ministral3ForCausalLM": MISTRAL,
    "MPTForCausalLM": MPT,
    "MptForCausalLM": MPT,
    "NemotronForCausalLM": usual(mlps=UNGATED),
    "OlmoForCausalLM": USUAL,
    "Olmo2ForCausalLM": usual(attention=NORMED_OVER_HEADS),
    "Olmo3ForCausalLM": usual(attention=partial(NORMED_OVER_HEADS, full_every=4)),
    "OlmoeForCausalLM": usual(attention=NORMED_OVER_HEADS),
    "OPTForCausalLM": biased(
        defaults=TIED,
        other_weights=learned_positions,
        no_effect=("word_embed_proj_dim",),
    ),
    "OrionForCausalLM": USUAL,
    "PersimmonForCausalLM": biased(),
    "PhiForCausalLM": biased(num_norms=1),
    "Phi3VForCausalLM": Architecture(
        attention=layers.phi3_attention,
        left_out={"img_processor": "vision tower of 0.3 B parameters (CLIP ViT-L/14) not counted: text in"},
        no_effect=("embd_layer",),
    ),
    "PhiMoEForCausalLM": usual(no_effect=("lm_head_bias",)),
    "QWenLMHeadModel": usual(
        attention=partial(usual_attention, qkv_bias=True), renamed=qwen_names, no_effect=("no_bias",)
    ),
    "SeedOssForCausalLM": usual(attention=partial(usual_attention)),
    "SmolLM3ForCausalLM": usual(defaults=TIED),
    "SolarForCausalLM": usual(no_effect=("bskcn_1", "bskcn_2", "bskcn_3", "bskcn_4", "bskcn_tv")),
    "StableLmForCausalLM": USUAL,
    "StableLMEpochForCausalLM": USUAL,
    "Starcoder2ForCausalLM": biased(defaults=TIED),
    "TeleChat2ForCausalLM": usual(mlps=partial(usual_mlp, gated=True)),
    "XverseForCausalLM": USUAL,
    "YiForCausalLM": USUAL,
}
"""Architectures by the name of their class in `architectures`."""

WRAPPERS: Mapping[str, Architecture] = {
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Gemma3nForConditionalGeneration": GEMMA3N,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Glm4vForConditionalGeneration": GLM4,
    "Glm4vMoeForConditionalGeneration": GLM4_MOE,
    "Glm5NextForConditionalGeneration": GLM5_NEXT,
    "HYV4VLForConditionalGeneration": HY_V4,
    "InklingForConditionalGeneration": INKLING,
    "Inkling2ForConditionalGeneration": INKLING2,
    "KimiK25ForConditionalGeneration": DEEPSEEK_V3,
    "KimiK3ForConditionalGeneration": KIMI_LINEAR,
    "Lfm3VlForConditionalGeneration": LFM3,
    "Llama4ForConditionalGeneration": LLAMA4,
    "MiniMaxM3SparseForConditionalGeneration": MINIMAX_M3,
    "Mistral3ForConditionalGeneration": MISTRAL,
    "Molmo2ForConditionalGeneration": usual(
        attention=NORMED, no_effect=("additional_vocab_size", "rope_scaling_layers")
    ),
    "MistralLarge4ForConditionalGeneration": MISTRAL_LARGE4,
    "MuseGlimmerForConditionalGeneration": MUSE,
    "MuseSparkForConditionalGeneration": MUSE,
    "Qwen2_5_VLForConditionalGeneration": QWEN2,
    "Qwen2VLForConditionalGeneration": QWEN2,
    "Qwen3VLForConditionalGeneration": QWEN3,
    "Qwen3VLMoeForConditionalGeneration": QWEN3_MOE,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE,
    "Step3p7ForConditionalGeneration": STEP3_7,
}
"""Models with image or audio inputs whose language model does not name its own architecture.

The language model is in text_config, or among the fields of the whole model.
"""

UNKNOWN = usual(
    attention=unknown_attention, defaults={"hidden_act": "silu"}, no_effect=("num_nextn_predict_layers",)
)
"""An unknown architecture: its fields have their usual meanings."""

KNOWN = (*ARCHITECTURES, *WRAPPERS)
