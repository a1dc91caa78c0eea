"""Number formats of the newer architectures: those of their quantisers, matrix by matrix."""

from hwmodels.hf.config import from_hf_fields
from hwmodels.model.weights import Role

V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128],
    "index_topk": 512,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
}


def test_deepseek_v4_has_attention_in_8_bits_and_experts_in_4():
    model = from_hf_fields(V4, "v4")
    assert model.weight_format_of(Role.dense) == "fp8_block"
    assert model.bytes_per_weight(Role.routed) == 0.5 + 1 / 32
    assert model.num_parameters == from_hf_fields({**V4, "expert_dtype": None}, "v4").num_parameters


NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "ME*E",
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "moe_latent_size": 256,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}


def formats_in(*left_out):
    """Returns the format of each matrix of a checkpoint in FP8 without these modules."""
    method = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": list(left_out)}
    model = from_hf_fields({**NEMOTRON, "quantization_config": method}, "hybrid")
    return {
        matrix.name: matrix.stored or model.weight_format_of(matrix.role)
        for block in model.blocks
        for matrix in block.layer_matrices(model.hidden_size)
    }


def test_modules_of_hybrids_that_are_left_out_stay_in_16_bits():
    """The mixer of layer 0 is Mamba, that of layer 2 attention; the latent projections are of all experts."""
    latent = [f"backbone.layers.{i}.mixer.fc{n}_latent_proj" for i in (1, 3) for n in (1, 2)]
    found = formats_in("lm_head", "backbone.layers.0.mixer.in_proj", "backbone.layers.2.mixer*", *latent)
    assert found["in_proj"] == found["qkv_proj"] == found["o_proj"] == "bf16"
    assert found["latent_down_proj"] == found["latent_up_proj"] == "bf16"
    assert found["out_proj"] == found["expert_up_proj"] == "fp8"


def test_without_such_modules_every_matrix_is_quantised_but_the_router():
    found = formats_in("lm_head")
    assert {name for name, stored in found.items() if stored != "fp8"} == {"router"}
