"""Reading config.json files as the Hugging Face hub holds them."""

import json
import re
from dataclasses import replace

import pytest

from hwmodels.hf.config import from_hf_config, from_hf_fields
from hwmodels.model.model_spec import (
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    MixtureOfExperts,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.fixture
def written(tmp_path):
    """Writes a config.json with changes to Llama-3.1-8B's, returns its folder."""

    def write(remove=(), **changes):
        config = {key: value for key, value in {**LLAMA, **changes}.items() if key not in remove}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


def test_a_folder_and_its_file_give_the_preset(written, models):
    folder = written()
    from_folder = from_hf_config(folder)
    preset = models["llama3_1_8b"]
    assert from_folder == from_hf_config(f"{folder}/config.json")
    assert replace(from_folder, name=preset.name, source=preset.source) == preset


def attention_of(folder):
    """Returns the attention of a model whose layers are all alike."""
    [block] = from_hf_config(folder).blocks
    return block.attention


def test_qwen2_has_qkv_biases_and_a_window_that_is_switched_off(written):
    attention = attention_of(
        written(architectures=["Qwen2ForCausalLM"], sliding_window=8192, use_sliding_window=False)
    )
    assert (attention.qkv_bias, attention.qk_norm, attention.window) == (True, False, None)


def test_qwen2_leaves_its_first_layers_without_the_window(written):
    model = from_hf_config(
        written(
            architectures=["Qwen2ForCausalLM"],
            sliding_window=8192,
            use_sliding_window=True,
            max_window_layers=20,
        )
    )
    assert [(block.count, block.attention.window) for block in model.blocks] == [(20, None), (12, 8192)]


def test_qwen3_normalises_queries_and_keys_and_states_its_head_dim(written):
    attention = attention_of(written(architectures=["Qwen3ForCausalLM"], head_dim=64))
    assert (attention.qkv_bias, attention.qk_norm, attention.head_dim) == (False, True, 64)


def test_llama_may_have_biases_everywhere(written):
    [block] = from_hf_config(written(attention_bias=True, mlp_bias=True)).blocks
    assert (block.attention.qkv_bias, block.attention.o_bias, block.mlp.bias) == (True, True, True)


def test_mistral_has_a_window(written):
    assert attention_of(written(architectures=["MistralForCausalLM"], sliding_window=4096)).window == 4096


def test_a_window_may_be_called_sliding_window_size(written):
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window_size": 4096}
    assert attention_of(written(**mistral)).window == 4096
    assert attention_of(written(**mistral, sliding_window=4096)).window == 4096
    with pytest.raises(ValueError, match="sliding_window_size=4096: must be the same as sliding_window=512"):
        from_hf_config(written(**mistral, sliding_window=512))


def test_a_window_as_long_as_the_context_is_none(written):
    folder = written(architectures=["MistralForCausalLM"], sliding_window=131072)
    assert attention_of(folder).window is None


def test_layer_types_say_which_layers_have_the_window(written):
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    model = from_hf_config(
        written(
            architectures=["MistralForCausalLM"],
            sliding_window=4096,
            layer_types=kinds,
            num_hidden_layers=4,
        )
    )
    assert [(block.count, block.attention.window) for block in model.blocks] == [(3, 4096), (1, None)]


def test_without_kv_heads_every_head_has_its_own(written):
    assert attention_of(written(remove=["num_key_value_heads"])).num_kv_heads == 32


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "float16"}, "fp16"),
        ({"torch_dtype": "float32"}, "bf16"),
        ({"dtype": "float16"}, "fp16"),
    ],
)
def test_dtype_is_the_checkpoints_and_fp32_is_served_in_bf16(written, changes, dtype):
    assert from_hf_config(written(**changes)).dtype == dtype


def test_the_user_may_ask_for_another_dtype(written):
    assert from_hf_config(written(), dtype="fp16").dtype == "fp16"


def test_rejects_an_unknown_architecture_with_the_known_ones_and_the_fields_not_understood(written):
    with pytest.raises(ValueError, match="architectures=MambaForCausalLM: unknown") as error:
        from_hf_config(written(architectures=["MambaForCausalLM"], state_size=16, use_cache=True))
    assert "known: LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Qwen2" in str(error.value)
    assert "Llama4ForConditionalGeneration" in str(error.value)
    assert str(error.value).endswith("fields not understood: state_size")


def test_rejects_missing_fields_by_name(written):
    with pytest.raises(
        ValueError, match="json: num_hidden_layers, vocab_size: missing; LlamaForCausalLM needs them"
    ):
        from_hf_config(written(remove=["num_hidden_layers", "vocab_size"]))
    with pytest.raises(ValueError, match="json: num_local_experts, num_experts_per_tok: missing; Mixtral"):
        from_hf_config(written(architectures=["MixtralForCausalLM"]))


def test_rejects_a_size_that_is_no_whole_number(written):
    with pytest.raises(ValueError, match='hidden_size="4096": must be a whole number'):
        from_hf_config(written(hidden_size="4096"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": 5}, "architectures=5: must be a list of one name; known: LlamaForCausalLM"),
        ({"architectures": None}, "architectures=null: must be a list of one name"),
        ({"architectures": []}, "architectures=[]: must be a list of one name"),
        (
            {"architectures": "LlamaForCausalLM"},
            'architectures="LlamaForCausalLM": must be a list of one name',
        ),
        ({"architectures": [["LlamaForCausalLM"]]}, "must be a list of one name"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be a whole number >= 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers=true: must be a whole number >= 1"),
        ({"vocab_size": float("nan")}, "vocab_size=NaN: must be a whole number >= 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0: must be a whole number >= 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads=32"),
        ({"head_dim": 0}, "head_dim=0: must be a whole number >= 1"),
        (
            {"hidden_size": 66, "num_attention_heads": 4, "num_key_value_heads": 4},
            "hidden_size=66: must be a multiple of num_attention_heads=4, or give head_dim",
        ),
        ({"sliding_window": "x"}, 'sliding_window="x": must be a whole number >= 1'),
        ({"sliding_window": 0}, "sliding_window=0: must be a whole number >= 1"),
        ({"use_sliding_window": "no"}, 'use_sliding_window="no": must be true or false'),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings="false": must be true or false'),
        ({"attention_bias": 1}, "attention_bias=1: must be true or false"),
        ({"torch_dtype": ["a"]}, 'torch_dtype=["a"]: must be one of float16, bfloat16, float32'),
        ({"dtype": 16}, "dtype=16: must be one of float16, bfloat16, float32"),
        ({"layer_types": ["linear_attention"] * 32}, 'layer_types=["linear_attention", '),
        ({"layer_types": 32}, "layer_types=32: must be a list of full_attention and sliding_attention"),
        ({"layer_types": ["full_attention"]}, 'layer_types=["full_attention"]: must name 32 layers, names 1'),
        ({"quantization_config": 8}, "quantization_config=8: must be an object with a quant_method"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_rejects_a_wrong_value_with_file_field_value_and_rule(written, changes, message):
    folder = written(**changes)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        from_hf_config(folder)
    assert str(error.value).startswith(f"{folder}/config.json: ")


def test_heads_need_not_share_the_hidden_size_out_where_head_dim_is_given(written):
    model = from_hf_config(written(hidden_size=66, num_attention_heads=4, num_key_value_heads=4, head_dim=16))
    assert (model.hidden_size, model.blocks[0].attention.head_dim) == (66, 16)


def test_rejects_fields_of_a_known_architecture_that_it_does_not_understand(written):
    with pytest.raises(ValueError, match="num_experts_per_tok=2, num_local_experts=8: not understood"):
        from_hf_config(written(num_local_experts=8, num_experts_per_tok=2))


@pytest.mark.parametrize("nothing", [None, False, 0, {}])
def test_fields_that_switch_nothing_on_are_let_through(written, nothing):
    assert from_hf_config(written(num_local_experts=nothing)) == from_hf_config(written())


def test_rejects_an_unknown_dtype(written):
    with pytest.raises(ValueError, match='torch_dtype="float64": must be one of float16, bfloat16, float32'):
        from_hf_config(written(torch_dtype="float64"))


def test_rejects_malformed_json_with_line_and_column(tmp_path):
    (tmp_path / "config.json").write_text('{\n  "hidden_size": ,\n}')
    with pytest.raises(ValueError, match=r"config.json:2:18: not JSON"):
        from_hf_config(str(tmp_path))


def test_rejects_a_file_that_is_no_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"{\xff}")
    with pytest.raises(ValueError, match=r"config.json: not UTF-8 at byte 1"):
        from_hf_config(str(tmp_path))


def test_rejects_json_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold one JSON object, holds a list"):
        from_hf_config(str(tmp_path))


def test_rejects_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        from_hf_config(str(tmp_path / "nowhere.json"))


# Families, with the fields that their published files have


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"factor": 40, "type": "yarn"},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "rope_type": "yarn"},
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}

GEMMA_3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}

GEMMA_2_9B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}

LLAMA_4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "text_config": {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "cache_implementation": "hybrid",
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1408},
}

QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 512,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

GEMMA_3N = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "audio_config": {"hidden_size": 1536},
    "text_config": {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
        "altup_active_idx": 0,
        "altup_num_inputs": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": [8192] * 30,
        "laurel_rank": 64,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
        "num_attention_heads": 8,
        "num_hidden_layers": 30,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 10,
        "sliding_window": 512,
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
    },
    "vision_config": {"hidden_size": 2048},
}

MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}

PHI_3_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "sliding_window": 2047,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}

QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(config, **changes):
    return from_hf_fields({**config, **changes}, name="model")


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
    assert read(config).num_parameters == num_parameters


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


def test_gemma_3_sees_everything_in_each_sixth_layer_and_its_vision_tower_is_ignored():
    model = read(GEMMA_3_27B)
    assert [(block.count, block.attention.window) for block in model.blocks] == [(52, 1024), (10, None)]
    assert model.blocks[0].attention.qk_norm
    assert model.blocks[0].num_norms == 4
    assert (model.vocab_size, model.tie_word_embeddings) == (262208, True)
    assert model.notes == ("vision tower ignored: text in, text out",)


def test_gemma_2_alternates():
    model = read(GEMMA_2_9B)
    assert [(block.count, block.attention.window) for block in model.blocks] == [(21, 4096), (21, None)]
    assert model.tie_word_embeddings


def test_gemma_3n_shares_the_kv_of_its_last_layers_and_says_what_is_left_out():
    model = read(GEMMA_3N)
    kinds = [(b.count, b.attention.window, b.attention.shares_kv) for b in model.blocks]
    assert kinds == [(16, 512, False), (4, None, False), (8, 512, True), (2, None, True)]
    assert sum(layers.count for layers in model.kv_layers()) == 20
    assert [note.split(" ")[0] for note in model.notes] == ["vision", "audio", "per-layer"]


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
    assert (model.weights, model.moe_weights) == (None, "int4_wo")
    assert model.notes[0].startswith("vision tower ignored")
    assert "groups of 128 weights, the checkpoint's are 32" in model.notes[1]


# How weights are stored


def group(kind, bits, **more):
    given = {"type": kind, "num_bits": bits, **more}
    activations = given.pop("activations", None)
    return {"config_groups": {"group_0": {"weights": given, "input_activations": activations}}}


@pytest.mark.parametrize(
    ("quantization", "weights"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4_wo"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4_wo"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8_wo"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "nvfp4"),
        ({"quant_method": "compressed-tensors", **group("float", 8, activations={"num_bits": 8})}, "fp8"),
        ({"quant_method": "compressed-tensors", **group("float", 8, strategy="block")}, "fp8_block"),
        ({"quant_method": "compressed-tensors", **group("float", 4, group_size=16)}, "nvfp4"),
        ({"quant_method": "compressed-tensors", **group("float", 4, group_size=32)}, "mxfp4"),
        ({"quant_method": "compressed-tensors", **group("int", 8, activations={"num_bits": 8})}, "int8"),
        ({"quant_method": "compressed-tensors", **group("int", 8)}, "int8_wo"),
        ({"quant_method": "compressed-tensors", **group("int", 4, group_size=128)}, "int4_wo"),
    ],
)
def test_reads_how_a_checkpoint_is_quantised(quantization, weights):
    model = read(LLAMA, quantization_config=quantization)
    assert (model.weights, model.moe_weights, model.notes) == (weights, None, ())


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            'quantization_config.quant_method="bitsandbytes": cannot be priced; known: awq, gptq',
        ),
        ({"bits": 4}, "quantization_config.quant_method=null: cannot be priced"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 4}}},
            "quantization_config.config_groups.a.weights=4: must be an object",
        ),
        ({"quant_method": "awq", "bits": [4]}, "quantization_config.bits=[4]: must be 4 or 8 for awq"),
        ({"quant_method": "modelopt"}, "quantization_config.quant_algo=null: cannot be priced"),
        ({"quant_method": "gptq", "bits": 3}, "quantization_config.bits=3: must be 4 or 8 for gptq"),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            "quantization_config.weight_block_size=[64, 64]: must be [128, 128] or null",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8"},
            'quantization_config.quant_algo="W4A8": cannot be priced; known: FP8, NVFP4',
        ),
        (
            {"quant_method": "compressed-tensors"},
            "quantization_config.config_groups=null: must hold at least one group",
        ),
        (
            {"quant_method": "compressed-tensors", **group("int", 4, activations={"num_bits": 8})},
            'config_groups.group_0: type="int", num_bits=4 with quantised activations cannot be priced',
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": {"type": "int", "num_bits": 4}},
                    "b": {"weights": {"type": "float", "num_bits": 8}},
                },
            },
            "quantization_config.config_groups: fp8 and int4_wo in one checkpoint cannot be priced",
        ),
    ],
)
def test_rejects_other_ways_of_quantising_by_name(quantization, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(LLAMA, quantization_config=quantization)


@pytest.mark.parametrize(
    ("left_out", "formats"),
    [
        (["lm_head", "*.mlp.gate"], ("nvfp4", None)),
        (["lm_head", "model.layers.0.self_attn*"], (None, "nvfp4")),
        (["model.layers.0.self_attn.o_proj"], (None, "nvfp4")),
        (["model.layers.0.self_attn.kv_b_proj"], ("nvfp4", None)),
        (["vision_tower.layers.0.self_attn.o_proj"], ("nvfp4", None)),
    ],
)
def test_experts_alone_are_quantised_where_attention_is_left_out(left_out, formats):
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": left_out}
    model = read(QWEN2_MOE, quantization_config=config)
    assert (model.weights, model.moe_weights) == formats
    assert len(model.notes) == (formats[0] is None)


def test_dense_models_that_leave_attention_out_say_that_it_counts_as_quantised():
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["*self_attn*"]}
    model = read(LLAMA, quantization_config=config)
    assert model.weights == "nvfp4"
    assert model.notes == ("attention counted in nvfp4 too, which quantization_config leaves out",)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "auto"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}, "auto"),
        (
            {
                "quant_method": "modelopt",
                "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
            },
            "fp8",
        ),
    ],
)
def test_keys_and_values_are_stored_as_the_checkpoint_says(given, dtype):
    model = read(LLAMA, quantization_config=given | group("float", 8))
    assert (model.weights, model.kv_cache_dtype, model.notes) == ("fp8", dtype, ())
    asked = from_hf_fields(
        {**LLAMA, "quantization_config": given | group("float", 8)}, name="model", kv_cache_dtype="bf16"
    )
    assert asked.kv_cache_dtype == "bf16"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kv_cache_quant_algo": "NVFP4"}, 'kv_cache_quant_algo="NVFP4"'),
        ({"kv_cache_scheme": {"type": "int", "num_bits": 8}}, "kv_cache_scheme={"),
    ],
)
def test_other_ways_of_storing_keys_and_values_are_noted(given, named):
    config = {"quant_method": "modelopt", "quant_algo": "FP8", **given}
    model = read(LLAMA, quantization_config=config)
    assert model.kv_cache_dtype == "auto"
    (note,) = model.notes
    assert note.startswith("keys and values counted in the model's dtype: quantization_config.")
    assert f".{named}" in note
    assert note.endswith("is not known; set kv_cache_dtype")


def test_the_user_may_choose_other_formats_than_the_checkpoint():
    chosen = from_hf_fields(GPT_OSS, name="model", weights="fp8", kv_cache_dtype="fp8", dtype="fp16")
    assert (chosen.weights, chosen.moe_weights, chosen.kv_dtype, chosen.dtype) == (
        "fp8",
        "mxfp4",
        "fp8",
        "fp16",
    )
    unquantised = from_hf_fields(DEEPSEEK_V3, name="model", weights="bf16")
    assert unquantised.weight_bytes_per_rank() == 2 * unquantised.num_parameters


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
