"""Families of models: shapes from the fields of their published config.json."""

import re
from dataclasses import replace

import pytest

from hwmodels.model import (
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    MixtureOfExperts,
)
from hwmodels.speculation.draft import LayerDraft
from tests.hwmodels.hf.published import (
    DEEPSEEK_V3,
    GEMMA_2_9B,
    GEMMA_3_27B,
    GEMMA_3N,
    GPT_OSS,
    LLAMA,
    LLAMA_4_SCOUT,
    MINIMAX_M2,
    PHI_3_MINI,
    QWEN2_MOE,
    QWEN3_NEXT,
    read,
)


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        pytest.param(DEEPSEEK_V3, 671_026_419_200, id="DeepSeek-V3"),
        pytest.param(GPT_OSS, 20_914_757_184, id="gpt-oss-20b"),
        pytest.param(GEMMA_3_27B, 27_009_346_304, id="Gemma-3-27B"),
        pytest.param(GEMMA_2_9B, 9_241_705_984, id="Gemma-2-9B"),
        pytest.param(PHI_3_MINI, 3_821_079_552, id="Phi-3-mini"),
        pytest.param(QWEN2_MOE, 14_315_784_192, id="Qwen1.5-MoE-A2.7B"),
    ],
)
def test_has_exactly_the_parameters_of_the_checkpoint(config, num_parameters):
    """Those of the language model: the fields that stand here do not describe towers in full."""
    assert read({**config, "vision_config": None}).num_parameters == num_parameters


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        pytest.param(QWEN3_NEXT, 79.7e9, 3.9e9, id="Qwen3-Next-80B-A3B"),
        pytest.param(LLAMA_4_SCOUT, 107.8e9, 17.2e9, id="Llama-4-Scout"),
        pytest.param(MINIMAX_M2, 228.7e9, 11.0e9, id="MiniMax-M2"),
    ],
)
def test_has_about_the_parameters_of_the_checkpoint(config, total, active):
    """The total is that of the published weights without vision tower, MTP layers and scales."""
    assert read(config).num_parameters == pytest.approx(total, rel=2e-3)
    assert read(config).num_active_parameters == pytest.approx(active, rel=0.02)


def test_deepseek_v3_has_latent_attention_three_dense_layers_and_an_mtp_layer():
    model = read(DEEPSEEK_V3)
    assert [block.count for block in model.blocks] == [3, 58]
    assert model.blocks[0].attention == LatentAttention(
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    assert model.blocks[0].mlp == DenseMlp(intermediate_size=18432)
    assert model.blocks[1].mlp == MixtureOfExperts(
        num_experts=256, top_k=8, intermediate_size=2048, shared_intermediate_size=2048, router_bias=True
    )
    assert model.num_mtp_modules == 1
    assert (model.weights, model.moe_weights) == ("fp8_block", None)
    assert model.kv_bytes_per_token() == 61 * 576 * 2


def test_deepseek_v2_lite_projects_queries_at_once_and_routes_without_a_bias():
    model = read(DEEPSEEK_V3, architectures=["DeepseekV2ForCausalLM"], q_lora_rank=None, topk_method="greedy")
    assert model.blocks[0].attention.q_lora_rank is None
    assert not model.blocks[1].mlp.router_bias


def test_an_indexer_makes_latent_attention_sparse():
    model = read(
        DEEPSEEK_V3,
        architectures=["DeepseekV32ForCausalLM"],
        index_topk=2048,
        index_n_heads=64,
        index_head_dim=128,
    )
    attention = model.blocks[0].attention
    assert (attention.sparse_top_k, attention.index_n_heads, attention.index_head_dim) == (2048, 64, 128)


def test_mlp_layer_types_say_which_layers_have_experts():
    model = read(DEEPSEEK_V3, mlp_layer_types=["dense"] * 2 + ["sparse"] * 59)
    assert [block.count for block in model.blocks] == [2, 59]


def test_gpt_oss_alternates_windows_and_has_sinks_and_biases():
    model = read(GPT_OSS)
    windowed, full = (block.attention for block in model.blocks)
    assert [block.count for block in model.blocks] == [12, 12]
    assert windowed == GroupedQueryAttention(
        num_heads=64, num_kv_heads=8, head_dim=64, qkv_bias=True, o_bias=True, sinks=True, window=128
    )
    assert full == replace(windowed, window=None)
    assert (model.weights, model.moe_weights, model.notes) == (None, "mxfp4", ())
    without_types = {name: value for name, value in GPT_OSS.items() if name != "layer_types"}
    assert read(without_types) == model


def test_gemma_3_sees_everything_in_each_sixth_layer_and_its_vision_tower_counts():
    model = read(GEMMA_3_27B)
    assert [(block.count, block.attention.window) for block in model.blocks] == [(52, 1024), (10, None)]
    assert model.blocks[0].attention.qk_norm
    assert model.blocks[0].num_norms == 4
    assert (model.vocab_size, model.tie_word_embeddings) == (262208, True)
    assert [other.name for other in model.other_weights] == ["vision tower"]
    assert model.notes[0].startswith("vision tower of 0.4")


def test_gemma_2_alternates():
    model = read(GEMMA_2_9B)
    assert [(block.count, block.attention.window) for block in model.blocks] == [(21, 4096), (21, None)]
    assert model.tie_word_embeddings


def test_gemma_3n_shares_the_kv_of_its_last_layers_and_counts_its_tables():
    """The makers state 6.87 billion parameters without towers: half of the memory is read row by row."""
    model = read(GEMMA_3N)
    kinds = [(b.count, b.attention.window, b.attention.shares_kv) for b in model.blocks]
    assert kinds == [(16, 512, False), (4, None, False), (8, 512, True), (2, None, True)]
    assert sum(layers.count for layers in model.kv_layers()) == 20
    assert [other.name for other in model.other_weights] == [
        "per-layer embeddings",
        "LAuReL and AltUp",
    ]
    assert model.other_weights[0].elements == 30 * 256 * (262144 + 3 * 2048)
    assert [note.split(" ")[:3] for note in model.notes] == [
        ["vision", "tower", "not"],
        ["audio", "tower", "not"],
    ]


def test_llama_4_attends_in_chunks_where_positions_are_rotated():
    model = read(LLAMA_4_SCOUT)
    assert [(block.count, block.attention.window) for block in model.blocks] == [(36, 8192), (12, None)]
    assert model.blocks[0].mlp == MixtureOfExperts(
        num_experts=16, top_k=1, intermediate_size=8192, shared_intermediate_size=8192
    )
    listed = {**LLAMA_4_SCOUT["text_config"], "no_rope_layers": [1] * 40 + [0] * 8}
    assert [block.count for block in read(LLAMA_4_SCOUT, text_config=listed).blocks] == [40, 8]


def test_llama_4_maverick_has_experts_in_every_second_layer():
    text = {**LLAMA_4_SCOUT["text_config"], "interleave_moe_layer_step": 2, "attention_chunk_size": None}
    model = read(LLAMA_4_SCOUT, text_config=text)
    assert {(block.count, type(block.mlp)) for block in model.blocks} == {
        (24, DenseMlp),
        (24, MixtureOfExperts),
    }
    assert DenseMlp(intermediate_size=16384) in [block.mlp for block in model.blocks]


def test_qwen3_next_mixes_linear_and_gated_attention():
    model = read(QWEN3_NEXT)
    delta, full = model.blocks
    assert (delta.count, full.count) == (36, 12)
    assert delta.attention == LinearAttention(
        num_key_heads=16, key_head_dim=128, num_value_heads=32, value_head_dim=128
    )
    assert (full.attention.output_gate, full.attention.qk_norm) == (True, True)
    assert full.mlp.shared_gate
    assert model.kv_bytes_per_token() == 12 * 2 * 2 * 256 * 2
    assert model.num_mtp_modules == 1  # which vLLM runs and no config.json names
    of_module = LayerDraft(kind="mtp", start_s=0.0, step_s=0.0).layers(model).blocks[0]
    assert (of_module.attention, of_module.mlp) == (full.attention, full.mlp)


def test_qwen_moe_keeps_some_layers_dense():
    model = read(QWEN2_MOE, decoder_sparse_step=2, mlp_only_layers=[1, 3])
    assert [(block.count, type(block.mlp)) for block in model.blocks] == [
        (14, DenseMlp),
        (10, MixtureOfExperts),
    ]


def test_mixtral_has_experts_as_wide_as_its_intermediate_size():
    mixtral = {**LLAMA, "architectures": ["MixtralForCausalLM"], "vocab_size": 32000}
    model = read(mixtral, num_local_experts=8, num_experts_per_tok=2)
    assert model.num_parameters == 46_702_792_704
    assert model.num_active_parameters == 12_879_925_248


def test_minimax_m2_has_three_mtp_layers():
    model = read(MINIMAX_M2)
    assert model.num_mtp_modules == 3
    assert model.blocks[0].attention.qk_norm
    with pytest.raises(ValueError, match=r"config.attn_type_list=\[0, 1\]: must be all 1"):
        read(MINIMAX_M2, attn_type_list=[0, 1])


def test_kimi_k2_5_keeps_its_language_model_and_quantisation_in_text_config():
    scheme = {"type": "int", "num_bits": 4, "group_size": 32, "strategy": "group"}
    quantisation = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    }
    model = read(
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "media_placeholder_token_id": 163605,
            "vision_config": {"vt_hidden_size": 1152},
            "text_config": {**DEEPSEEK_V3, "quantization_config": quantisation},
        }
    )
    assert (model.weights, model.moe_weights) == (None, "int4_wo_s32")
    assert model.notes[0].startswith("vision tower not counted")


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN2_MOE, {"num_experts_per_tok": 61}, "num_experts_per_tok=61: must be <= num_experts=60"),
        (QWEN2_MOE, {"mlp_only_layers": ["a"]}, 'mlp_only_layers=["a"]: must be a list of whole numbers'),
        (DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank: missing; DeepseekV3ForCausalLM needs them"),
        (DEEPSEEK_V3, {"index_topk": 2048}, "index_n_heads=null: must be a whole number >= 1"),
        (QWEN3_NEXT, {"mamba_ssm_dtype": "int8"}, 'mamba_ssm_dtype="int8": must be float32 or bfloat16'),
        (GEMMA_3_27B, {"text_config": 5}, "text_config=5: must be an object"),
        (GPT_OSS, {"num_hidden_layers": 6}, "must name 6 layers, names 24; or leave it out"),
    ],
)
def test_rejects_a_wrong_value_of_a_family_with_the_setting_that_holds_it(config, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(config, **changes)
    assert str(error.value).startswith("config.")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_kv_shared_layers", 30, "num_kv_shared_layers=30: must be < num_hidden_layers"),
        ("intermediate_size", [8192] * 3, "must name 30 layers, names 3"),
    ],
)
def test_rejects_a_wrong_value_inside_text_config(field, value, message):
    with pytest.raises(ValueError, match=message):
        read(GEMMA_3N, text_config={**GEMMA_3N["text_config"], field: value})
