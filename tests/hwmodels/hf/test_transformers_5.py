"""Architectures and spellings that transformers 5 adds: parameters and KV of its default configurations.

Parameters are those of transformers' own modules (5.24, on the meta device), of the language model and its
head where the model has towers. KV is in bf16, by hand; keys of indexers are in fp8 with a scale of 4 bytes.
"""

import pytest

from hwmodels.hf.config import from_hf_fields
from hwmodels.model.attention import GroupedQueryAttention, LatentAttention
from hwmodels.model.recurrent import KimiDeltaAttention, LinearAttention

SLIDING, FULL, LINEAR, INDEXED = (
    "sliding_attention",
    "full_attention",
    "linear_attention",
    "indexed_attention",
)
LATENT = {"kv_lora_rank": 512, "v_head_dim": 128}
INDEXER = {"index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048}


def shape(layers, hidden, heads, kv_heads, vocab, **others):
    """Returns the fields that every file has."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        **others,
    }


def experts(num, top_k, width, *, name="n_routed_experts", dense=0, layers=0, **others):
    """Returns the fields of experts in the layers after the first dense ones."""
    kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
    fields = {name: num, "num_experts_per_tok": top_k, "moe_intermediate_size": width, **others}
    return fields | ({"mlp_layer_types": kinds} if layers else {})


def every(period, layers, usual, nth):
    """Returns layer_types with one kind in each period-th layer."""
    return [usual if (i + 1) % period else nth for i in range(layers)]


LAGUNA = shape(40, 2048, 48, 8, 100352, intermediate_size=8192, head_dim=128, gating=True)
LAGUNA |= experts(256, 8, 512, name="num_experts", dense=1, layers=40, shared_expert_intermediate_size=512)
LAGUNA |= {"layer_types": [FULL] * 40, "num_attention_heads_per_layer": [48] * 40, "sliding_window": 512}

GLM5_NEXT = shape(45, 4096, 64, 64, 154880, intermediate_size=12288, head_dim=0, **INDEXER)
GLM5_NEXT |= experts(288, 8, 2048, dense=3, layers=45, n_shared_experts=1)
GLM5_NEXT |= {**LATENT, "q_lora_rank": 1536, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0}
GLM5_NEXT |= {"v_head_dim": 256, "index_kpool": 16, "indexer_types": ["full"] * 45, "hc_mult": 4}
GLM5_NEXT |= {"linear_num_heads": 64, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
GLM5_NEXT |= {"layer_types": every(4, 45, LINEAR, INDEXED)}

MISTRAL_LARGE4 = shape(72, 6144, 64, 64, 204800, intermediate_size=24576, **LATENT, **INDEXER)
MISTRAL_LARGE4 |= experts(128, 4, 6144, dense=1, layers=72, n_shared_experts=1)
MISTRAL_LARGE4 |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "indexer_types": ["full"] * 72}
MISTRAL_LARGE4 |= {"no_rope_layers": every(4, 72, 1, 0), "kv_source_layers": list(range(72))}

HY_V4 = shape(34, 2816, 32, 32, 120832, intermediate_size=6912, **LATENT, **INDEXER)
HY_V4 |= experts(256, 8, 768, dense=1, layers=34, n_shared_experts=1)
HY_V4 |= {"q_lora_rank": 1536, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
HY_V4 |= {"index_n_heads": 16, "hc_mult": 4, "hc_magnitude": 2.0, "layer_types": [INDEXED] * 34}
HY_V4 |= {"indexer_types": ["full" if i < 2 or i % 4 == 1 else "shared" for i in range(34)]}

DOTS3 = shape(46, 5120, 128, 128, 152064, intermediate_size=13824, **LATENT, **INDEXER)
DOTS3 |= experts(256, 8, 1536, dense=1, layers=46, n_shared_experts=1, shared_experts_intermediate_size=1536)
DOTS3 |= {"q_lora_rank": 1024, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "index_n_heads": 64}
DOTS3 |= {
    "sliding_window": 512,
    "layer_types": [INDEXED if i < 2 or i % 4 == 1 else SLIDING for i in range(46)],
    "per_layer_config": {
        f"{i:02}": {"kv_lora_rank": 1024, "num_attention_heads": 64, "qk_nope_head_dim": 192}
        for i in range(46)
        if i >= 2 and i % 4 != 1
    },
}

INKLING = shape(66, 6144, 64, 8, 201024, intermediate_size=24576, head_dim=128, d_rel=16, rel_extent=1024)
INKLING |= experts(256, 6, 3072, dense=0, layers=66, n_shared_experts=2)
INKLING |= {"sliding_window_size": 512, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 16}
INKLING |= {"swa_head_dim": 128, "layer_types": every(6, 66, "hybrid_sliding", "hybrid")}

INKLING2 = shape(48, 4608, 48, 8, 201024, head_dim=128, d_rel=16, rel_extent=1024)
INKLING2 |= experts(384, 8, 2304)
INKLING2 |= {"sliding_window_size": 1024, "swa_num_attention_heads": 48, "swa_num_key_value_heads": 8}
INKLING2 |= {"swa_head_dim": 128, "layer_types": every(6, 48, "hybrid_sliding", "hybrid")}
INKLING2 |= {"n_layers_per_attn_res_block": 6}

MUSE_GLIMMER = shape(52, 6656, 32, 2, 202048, intermediate_size=19968, head_dim=128)
MUSE_GLIMMER |= {"sliding_window": 2048, "layer_types": every(4, 52, SLIDING, FULL)}

MUSE_SPARK = shape(62, 8192, 128, 16, 202048, intermediate_size=16384, head_dim=64, moe_hidden_size=4096)
MUSE_SPARK |= experts(256, 8, 4096, name="num_local_experts", dense=0, layers=62)
MUSE_SPARK |= {"sliding_window": 2048, "layer_types": [*every(4, 60, SLIDING, FULL), SLIDING, FULL]}

KIMI_LINEAR = shape(27, 2304, 32, 32, 163840, intermediate_size=9216, **LATENT)
KIMI_LINEAR |= experts(256, 8, 1024, name="num_experts", dense=1, layers=27, num_shared_experts=1)
KIMI_LINEAR |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "linear_num_heads": 32}
KIMI_LINEAR |= {"linear_head_dim": 128, "layer_types": every(4, 27, LINEAR, FULL)}

BAILING = shape(42, 2560, 32, 32, 157184, intermediate_size=6144, head_dim=64, **LATENT)
BAILING |= experts(512, 8, 768, name="num_experts", dense=2, layers=42, num_shared_experts=1)
BAILING |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "linear_num_heads": 32}
BAILING |= {"linear_head_dim": 128, "layer_types": every(6, 42, LINEAR, FULL)}

COHERE2_MOE = shape(40, 8192, 64, 64, 256000, intermediate_size=22528, head_dim=128)
COHERE2_MOE |= {"num_experts": 8, "num_experts_per_tok": 2, "sliding_window": 4096}
COHERE2_MOE |= {"layer_types": every(4, 40, SLIDING, FULL)}

MINIMAX_M3 = shape(60, 6144, 64, 4, 200064, intermediate_size=3072, dense_intermediate_size=12288)
MINIMAX_M3 |= {"num_local_experts": 128, "num_experts_per_tok": 4, "shared_intermediate_size": 3072}
MINIMAX_M3 |= {"head_dim": 128, "index_block_size": 128, "index_head_dim": 128, "index_n_heads": 4}
MINIMAX_M3 |= {"index_topk_blocks": 16, "index_local_blocks": 1, "layer_types": [FULL] * 60}

DEEPSEEK_V4 = shape(43, 4096, 64, 1, 129280, head_dim=512, q_lora_rank=1024, o_lora_rank=1024, o_groups=8)
DEEPSEEK_V4 |= experts(256, 6, 2048, n_shared_experts=1)
DEEPSEEK_V4 |= {"mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40, "hc_mult": 4, "sliding_window": 128}
DEEPSEEK_V4 |= {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 512, "qk_rope_head_dim": 64}
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
DEEPSEEK_V4 |= {
    "compress_rates": {CSA: 4, HCA: 128},
    "layer_types": [HCA] * 2 + [CSA if i % 2 else HCA for i in range(2, 43)],
}

OLMO_HYBRID = shape(32, 3840, 30, 30, 100352, intermediate_size=11008, linear_conv_kernel_dim=4)
OLMO_HYBRID |= {"linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_key_head_dim": 96}
OLMO_HYBRID |= {"linear_value_head_dim": 192, "layer_types": every(4, 32, LINEAR, FULL)}

LFM3 = shape(24, 2048, 16, 4, 128000, intermediate_size=7680, head_dim=128, conv_L_cache=7)
LFM3 |= {"sliding_window": 256, "use_attention_gate": True}
LFM3 |= {
    "layer_types": [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else "conv" for i in range(24)]
}

STEP3P7 = shape(45, 4096, 64, 8, 128815, intermediate_size=11264, head_dim=128, share_expert_dim=1280)
STEP3P7 |= experts(288, 8, 1280, dense=3, layers=45, num_sliding_attention_heads=64, per_layer_config={})
STEP3P7 |= {"layer_types": [FULL] * 45}

BEAM = shape(52, 5120, 48, 8, 151936, intermediate_size=20480, head_dim=128, sliding_window=512)
BEAM |= experts(256, 8, 2560, name="num_experts", dense=3, layers=52)
BEAM |= {"layer_types": [*every(6, 52, SLIDING, FULL)[:51], FULL]}

LARA = shape(34, 1024, 16, 4, 151936, head_dim=128, sliding_window=512, linear_key_head_dim=128)
LARA |= experts(128, 4, 512, name="num_experts", shared_expert_intermediate_size=512)
LARA |= {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_value_head_dim": 128}
LARA |= {"layer_types": [LINEAR] * 14 + [SLIDING] * 13 + [FULL] * 7}

AXK2 = shape(48, 2048, 32, 32, 163840, intermediate_size=5120, gated_norm_rank=16, **INDEXER)
AXK2 |= experts(128, 8, 512, dense=1, layers=48, n_shared_experts=1)
AXK2 |= {"kv_lora_rank": 128, "q_lora_rank": 384, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
AXK2 |= {"v_head_dim": 64, "index_n_heads": 16, "layer_types": [INDEXED] * 48}

HY_V3 = shape(80, 4096, 64, 8, 120832, intermediate_size=13312, head_dim=128, enable_moe_fp32_combine=True)
HY_V3 |= experts(192, 8, 1536, name="num_experts", dense=1, layers=80, num_shared_experts=1)

QWEN3_MOE = shape(24, 2048, 32, 4, 151936, intermediate_size=6144, moe_intermediate_size=768)
QWEN3_MOE |= {
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "sliding_window": 0,
    "use_sliding_window": False,
}

QWEN3_VL_MOE = shape(24, 2048, 16, 16, 151936, intermediate_size=5632, head_dim=128)
QWEN3_VL_MOE |= {"num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
QWEN3_VL_MOE |= {"tie_word_embeddings": True}

GEMMA4 = shape(30, 2304, 8, 4, 262144, intermediate_size=9216, head_dim=256, sliding_window=512)
GEMMA4 |= {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
GEMMA4 |= {"layer_types": every(6, 30, SLIDING, FULL), "tie_word_embeddings": True}
GEMMA4 |= {"per_layer_config": {f"{i:02}": {"head_dim": 512} for i in range(5, 30, 6)}}

NEMOTRON_H = shape(4, 4096, 32, 8, 131072, intermediate_size=21504, head_dim=128, hidden_act="relu2")
NEMOTRON_H |= experts(8, 2, 7688, n_shared_experts=1, moe_shared_expert_intermediate_size=7688)
NEMOTRON_H |= {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}
NEMOTRON_H |= {"layers_block_type": [LINEAR, "moe", FULL, "mlp"], "mamba_ssm_cache_dtype": "float32"}

BITNET = shape(30, 2560, 20, 5, 128256, intermediate_size=6912, hidden_act="relu2")

MIMO = shape(48, 4096, 64, 4, 152576, intermediate_size=16384, head_dim=192, v_head_dim=128)
MIMO |= experts(256, 8, 2048, dense=1, layers=48)
MIMO |= {"layer_types": [FULL, *every(6, 48, SLIDING, FULL)[1:]], "sliding_window": 129}

MINIMAX = shape(32, 4096, 32, 8, 32000, intermediate_size=14336, mlp_alpha_factor=1, mlp_beta_factor=1)
MINIMAX |= {"num_local_experts": 8, "num_experts_per_tok": 2, "layer_types": [FULL, LINEAR] * 16}

ERNIE_VL = shape(28, 2560, 20, 4, 103424, intermediate_size=12288, tie_word_embeddings=True)
ERNIE_VL |= {"moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2, "moe_norm_min": 1e-12}
ERNIE_VL |= {"moe_intermediate_size": [1536, 512], "mlp_layer_types": ["dense"] + ["sparse"] * 27}


def read(architecture, fields):
    return from_hf_fields({"architectures": [architecture], **fields}, architecture)


@pytest.mark.parametrize(
    ("architecture", "fields", "millions", "kv_bytes"),
    [
        ("LagunaForCausalLM", LAGUNA, 33189.976, 40 * 2 * 8 * 128 * 2),
        ("Glm5NextForConditionalGeneration", GLM5_NEXT, 313326.817, 11 * (512 * 2 + 132 / 16)),
        (
            "MistralLarge4ForConditionalGeneration",
            MISTRAL_LARGE4,
            1050118.203,
            54 * 576 * 2 + 18 * 512 * 2 + 72 * 132,
        ),
        ("HYV4ForCausalLM", HY_V4, 58278.193, 34 * 576 * 2 + 10 * 132),
        ("Dots3NoteForCausalLM", DOTS3, 279551.718, 13 * (576 * 2 + 132) + 33 * 1088 * 2),
        ("InklingForCausalLM", INKLING, 975340.270, (55 * 16 + 11 * 8) * 2 * 128 * 2),
        ("InklingForConditionalGeneration", INKLING, 975340.270, (55 * 16 + 11 * 8) * 2 * 128 * 2),
        ("Inkling2ForCausalLM", INKLING2, 593718.479, 48 * 2 * 8 * 128 * 2),
        ("Inkling2ForConditionalGeneration", INKLING2, 593718.479, 48 * 2 * 8 * 128 * 2),
        ("MuseGlimmerForConditionalGeneration", MUSE_GLIMMER, 27854.781, 52 * 2 * 2 * 128 * 2),
        ("MuseSparkForConditionalGeneration", MUSE_SPARK, 819990.536, 62 * 2 * 16 * 64 * 2),
        ("KimiLinearForCausalLM", KIMI_LINEAR, 49133.074, 6 * 576 * 2),
        ("BailingHybridForCausalLM", BAILING, 124414.191, 7 * 576 * 2),
        ("Cohere2MoeForCausalLM", COHERE2_MOE, 190004.929, 40 * 2 * 64 * 128 * 2),
        ("MiniMaxM3VLForCausalLM", MINIMAX_M3, 447186.441, 60 * 2 * 4 * 128 * 2),
        ("DeepseekV4ForCausalLM", DEEPSEEK_V4, 284325.869, 20 * (1024 + 132) / 4 + 23 * 1024 / 128),
        ("OlmoHybridForCausalLM", OLMO_HYBRID, 7430.871, 8 * 2 * 30 * 128 * 2),
        ("Lfm3ForCausalLM", LFM3, 1728.802, 11 * 2 * 4 * 128 * 2),
        ("Lfm3VlForConditionalGeneration", LFM3, 1728.802, 11 * 2 * 4 * 128 * 2),
        ("Step3p7ForConditionalGeneration", STEP3P7, 195843.833, 45 * 2 * 8 * 128 * 2),
        ("BeamForCausalLM", BEAM, 501267.600, 52 * 2 * 8 * 128 * 2),
        ("LaraMiniForCausalLM", LARA, 7281.685, 20 * 2 * 4 * 128 * 2),
        ("AXK2ForCausalLM", AXK2, 20314.495, 48 * (160 * 2 + 132)),
        ("HYV3ForCausalLM", HY_V3, 295033.528, 80 * 2 * 8 * 128 * 2),
        ("Qwen3MoeForCausalLM", QWEN3_MOE, 15350.732, 24 * 2 * 4 * 64 * 2),
        ("Qwen3VLMoeForConditionalGeneration", QWEN3_VL_MOE, 13173.957, 24 * 2 * 16 * 128 * 2),
        ("Gemma4ForCausalLM", GEMMA4, 5077.178, (25 * 256 + 5 * 512) * 2 * 4 * 2),
        ("NemotronHForCausalLM", NEMOTRON_H, 1968.356, 2 * 8 * 128 * 2),
        ("BitNetForCausalLM", BITNET, 2741.156, 30 * 2 * 5 * 128 * 2),
        ("MiMoV2FlashForCausalLM", MIMO, 308778.769, (8 * 4 + 1 * 4 + 39 * 8) * (192 + 128) * 2),
        ("MiniMaxForCausalLM", MINIMAX, 47373.947, 16 * 2 * 8 * 128 * 2),
        ("Ernie4_5_VLMoeForConditionalGeneration", ERNIE_VL, 28624.636, 28 * 2 * 4 * 128 * 2),
    ],
)
def test_has_the_parameters_and_the_kv_of_transformers_modules(architecture, fields, millions, kv_bytes):
    model = read(architecture, fields)
    assert model.num_parameters / 1e6 == pytest.approx(millions, rel=0.005)
    assert model.kv_bytes_per_token() == pytest.approx(kv_bytes)


def test_experts_for_images_are_in_memory_and_in_no_time():
    model = read("Ernie4_5_VLMoeForConditionalGeneration", ERNIE_VL)
    [images] = model.other_weights
    assert images.elements == 27 * 64 * (3 * 2560 * 512 + 2560)
    assert model.blocks[-1].mlp.intermediate_size == 1536


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": {"head_dim": 512}}, "must have fields by the number of a layer below 30"),
        ({"30": {"head_dim": 512}}, "must have fields by the number of a layer below 30"),
        ({"5": 512}, "must have fields by the number of a layer below 30"),
        ({"5": {"made_up": 1}}, "made_up must not differ between layers"),
        ({"5": {"hidden_size": 4096}}, "hidden_size must not differ between layers"),
        ({"5": {"num_hidden_layers": 4}}, "num_hidden_layers must not differ between layers"),
        ({"9" * 5000: {}}, "must have fields by the number of a layer below 30"),
        ([], "must be an object"),
        ({"5": {"head_dim": -1}}, "head_dim=-1: must be a whole number"),
    ],
)
def test_fields_of_single_layers_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        read("Gemma4ForCausalLM", {**GEMMA4, "per_layer_config": given or [1]})


def test_more_kinds_of_layers_than_any_model_has_are_refused():
    every_layer = {str(i): {"num_attention_heads": i + 1} for i in range(300)}
    fields = shape(300, 64, 4, 2, 1000, intermediate_size=128, per_layer_config=every_layer)
    with pytest.raises(ValueError, match="per_layer_config: has more than 200 kinds of layers"):
        read("LlamaForCausalLM", fields)


def test_fields_of_a_layer_that_repeat_the_model_s_own_change_nothing():
    """Renaming twice would give Command A's experts the width of its dense layers."""
    own = {"first_k_dense_replace": 2, "prefix_dense_intermediate_size": 40960}
    plain = read("Cohere2MoeForCausalLM", {**COHERE2_MOE, **own})
    same = {"per_layer_config": {"5": {"num_key_value_heads": 64}}}
    assert read("Cohere2MoeForCausalLM", {**COHERE2_MOE, **own, **same}).blocks == plain.blocks


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 4 * 32768),
        ({"type": "dynamic", "factor": 2, "original_max_position_embeddings": 4096}, 2 * 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 4 * 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768),
        ({"full_attention": {"rope_type": "linear", "factor": 2.0}}, 2 * 32768),
        ({"rope_type": None, "type": "linear", "factor": 2.0}, 2 * 32768),
        ({"rope_type": "linear", "factor": 1e6}, 2**31 - 1),
        (None, 32768),
    ],
)
def test_scaled_positions_reach_further(rope, context):
    fields = shape(2, 64, 4, 2, 1000, intermediate_size=128)
    fields |= {"max_position_embeddings": 32768, "rope_scaling": rope}
    assert read("LlamaForCausalLM", fields).max_position_embeddings == context


@pytest.mark.parametrize("factor", [0, -1, "4", float("inf"), 1e305, 10**400, [2]])
def test_a_factor_of_positions_that_is_no_number_is_refused(factor):
    fields = {**BITNET, "rope_scaling": {"type": "linear", "factor": factor}}
    with pytest.raises(ValueError, match=r"rope_scaling.factor=.*: must be a number > 0 and <= 1,000,000"):
        read("BitNetForCausalLM", fields)


def test_layers_without_their_sources_or_windows_are_refused():
    for sources in ([0, 999, *range(2, 72)], [1, 0, *range(2, 72)]):
        with pytest.raises(ValueError, match=r"kv_source_layers=.*: must name for each layer itself"):
            read("MistralLarge4ForConditionalGeneration", {**MISTRAL_LARGE4, "kv_source_layers": sources})
    with pytest.raises(ValueError, match="sliding_window=null: must be given"):
        read("LaraMiniForCausalLM", {**LARA, "sliding_window": None})


@pytest.mark.parametrize(
    ("outer", "inner", "tied"), [(True, False, True), (False, True, False), (None, True, True)]
)
def test_the_whole_model_says_whether_the_vocabulary_has_one_table(outer, inner, tied):
    text = {**shape(2, 64, 4, 2, 1000, intermediate_size=128), "tie_word_embeddings": inner}
    fields = {"text_config": text} | ({} if outer is None else {"tie_word_embeddings": outer})
    assert read("Mistral3ForConditionalGeneration", fields).tie_word_embeddings is tied


def test_laguna_may_have_other_heads_and_windows_in_each_layer():
    own = {"num_attention_heads_per_layer": [48, 64] * 20, "layer_types": [FULL, SLIDING] * 20}
    layers = [block.attention for block in read("LagunaForCausalLM", {**LAGUNA, **own}).blocks]
    assert {(layer.num_heads, layer.window) for layer in layers} == {(48, None), (64, 512)}
    assert all(layer.head_gate and layer.qk_norm for layer in layers)
    gated = read("LagunaForCausalLM", {**LAGUNA, "gating": "per-element"}).blocks[0].attention
    assert gated.output_gate
    assert not gated.head_gate


def test_laguna_with_an_unknown_gate_or_a_short_list_is_refused():
    with pytest.raises(ValueError, match="must be true, per-head or per-element"):
        read("LagunaForCausalLM", {**LAGUNA, "gating": "per-token"})
    with pytest.raises(ValueError, match="must name 40 layers, names 1"):
        read("LagunaForCausalLM", {**LAGUNA, "num_attention_heads_per_layer": [48]})


def test_mistral_large_4_may_use_the_latent_vectors_of_an_earlier_layer():
    shared = {"kv_source_layers": [i - i % 2 for i in range(72)]}
    model = read("MistralLarge4ForConditionalGeneration", {**MISTRAL_LARGE4, **shared})
    # Of 36 layers without their own latent vectors, 18 have no part with position.
    kept = read("MistralLarge4ForConditionalGeneration", MISTRAL_LARGE4).kv_bytes_per_token()
    assert model.kv_bytes_per_token() == kept - (18 * 576 + 18 * 512) * 2


def test_latent_attention_of_dots3_has_windows_without_an_indexer():
    layers = [block.attention for block in read("Dots3NoteForCausalLM", DOTS3).blocks]
    windowed = [layer for layer in layers if layer.window == 512]
    selecting = [layer for layer in layers if layer.window is None]
    assert {(layer.num_heads, layer.kv_lora_rank, layer.sparse_top_k) for layer in windowed} == {
        (64, 1024, None)
    }
    assert {(layer.num_heads, layer.kv_lora_rank, layer.sparse_top_k) for layer in selecting} == {
        (128, 512, 2048)
    }


def test_windows_of_inkling_have_their_own_heads():
    layers = [block.attention for block in read("InklingForCausalLM", INKLING).blocks]
    assert {(layer.num_kv_heads, layer.window) for layer in layers} == {(16, 512), (8, None)}


@pytest.mark.parametrize(
    ("architecture", "fields", "kind", "count", "elements"),
    [
        ("Glm5NextForConditionalGeneration", GLM5_NEXT, KimiDeltaAttention, 34, (64 * 128 * 128, 3 * 8192)),
        ("BailingHybridForCausalLM", BAILING, KimiDeltaAttention, 35, (32 * 128 * 128, 3 * 4096)),
        ("OlmoHybridForCausalLM", OLMO_HYBRID, LinearAttention, 24, (30 * 96 * 192, 2 * 2880 + 5760)),
        ("LaraMiniForCausalLM", LARA, LinearAttention, 14, (16 * 128 * 128, 2 * 1024 + 2048)),
    ],
)
def test_linear_layers_keep_a_state_and_three_inputs_of_the_convolution(
    architecture, fields, kind, count, elements
):
    """The state is in fp32, the inputs of the convolution over queries, keys and values in bf16."""
    model = read(architecture, fields)
    state, channels = elements
    assert sum(b.count for b in model.blocks if isinstance(b.attention, kind)) == count
    assert model.state_bytes_per_sequence() == count * (state * 4 + 3 * channels * 2)


def test_both_spellings_of_kimi_linear_are_the_same_model():
    new = {"linear_num_heads", "linear_head_dim", "layer_types", "mlp_layer_types"}
    older = {name: value for name, value in KIMI_LINEAR.items() if name not in new}
    older |= {
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "num_heads": 32,
            "head_dim": 128,
            "full_attn_layers": [4, 8, 12, 16, 20, 24],
        },
    }
    assert read("KimiLinearForCausalLM", older).blocks == read("KimiLinearForCausalLM", KIMI_LINEAR).blocks


def test_minimax_m3_names_its_sparse_layers_in_layer_types():
    kinds = [FULL] * 3 + ["minimax_m3_sparse"] * 57
    model = read("MiniMaxM3VLForCausalLM", {**MINIMAX_M3, "layer_types": kinds})
    full, sparse = (block.attention for block in model.blocks)
    assert isinstance(full, GroupedQueryAttention)
    assert isinstance(sparse, GroupedQueryAttention)
    assert (full.sparse_top_k, sparse.sparse_top_k) == (None, 16 * 128)
    assert model.kv_bytes_per_token() == 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2


def test_command_a_moe_may_begin_with_dense_layers_of_their_own_width_and_windows():
    own = {"first_k_dense_replace": 2, "prefix_dense_intermediate_size": 40960}
    fields = {name: value for name, value in COHERE2_MOE.items() if name != "layer_types"}
    blocks = read("Cohere2MoeForCausalLM", {**fields, "max_position_embeddings": 8192, **own}).blocks
    assert [(b.count, b.attention.window) for b in blocks] == [(2, None), (29, 4096), (9, None)]
    assert blocks[0].mlp.intermediate_size == 40960


def test_windows_of_step_3_7_may_have_other_heads():
    own = {"layer_types": [FULL, SLIDING, SLIDING] * 15, "sliding_window": 512}
    heads = {"num_sliding_attention_heads": 96}
    model = read("Step3p7ForConditionalGeneration", {**STEP3P7, **own, **heads})
    by_window = {block.attention.window: block.attention.num_heads for block in model.blocks}
    assert by_window == {None: 64, 512: 96}


def test_parts_without_a_time_are_noted():
    assert any("hyper-connections" in note for note in read("HYV4ForCausalLM", HY_V4).notes)
    assert any("short convolutions" in note for note in read("InklingForCausalLM", INKLING).notes)
    assert any("earlier blocks" in note for note in read("Inkling2ForCausalLM", INKLING2).notes)


def test_queries_and_gate_of_one_matrix_need_a_compressed_query():
    with pytest.raises(ValueError, match="is made from the compressed query"):
        LatentAttention(
            num_heads=1,
            kv_lora_rank=1,
            qk_nope_head_dim=1,
            qk_rope_head_dim=1,
            v_head_dim=1,
            query_gate=True,
        )


@pytest.mark.parametrize("architecture", ["Inkling2LoopForCausalLM", "DoryForCausalLM"])
def test_models_that_run_layers_more_than_once_are_refused(architecture):
    kinds = ["hybrid_sliding", "hybrid"] * 24
    with pytest.raises(ValueError, match="layer_types"):
        read(architecture, {**INKLING2, "layer_types": kinds})
