"""Modules that a checkpoint leaves out of its format, or stores in another one."""

import pytest

from hwmodels.model.weights import Role
from tests.hwmodels.hf.published import DEEPSEEK_V3, GPT_OSS, LLAMA, QWEN2_MOE, QWEN3_NEXT, group, read

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
CT = {"quant_method": "compressed-tensors"}
FP8 = {"type": "float", "num_bits": 8}


def stored(model):
    """Returns {matrix: {format: number of layers}} of all matrices that can be quantised."""
    found = {}
    for block in model.blocks:
        for matrix in block.layer_matrices(model.hidden_size):
            if matrix.role is not Role.plain:
                name = matrix.stored or model.weight_format_of(matrix.role)
                layers = found.setdefault(matrix.name, {})
                layers[name] = layers.get(name, 0) + block.count
    return found


@pytest.mark.parametrize(
    "patterns",
    [
        ["model.layers.0.self_attn*", "model.layers.1.self_attn*"],
        ["model.layers.0.self_attn", "model.layers.1.self_attn"],
        ["layers.0.self_attn", "layers.1.self_attn"],
        ["model.language_model.layers.0.self_attn*", "language_model.model.layers.1.self_attn*"],
        [f"model.layers.{n}.self_attn.{name}_proj" for n in (0, 1) for name in "qkvo"],
        ["re:.*layers\\.[01]\\.self_attn.*"],
        ["re:model\\.layers\\.(0|1)\\.self_attn\\.(q|k|v|o)_proj"],
        ["*.layers.0.self_attn.*", "*.layers.1.self_attn.*"],
        ["model.layers.0.self_attn.*", "model.layers.1.self_attn.*"],
    ],
)
@pytest.mark.parametrize("key", ["ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"])
def test_patterns_of_all_kinds_name_modules(patterns, key):
    model = read(LLAMA, quantization_config=NVFP4 | {key: [*patterns, "lm_head"]})
    attention, all_layers = {"bf16": 2, "nvfp4": 30}, {"nvfp4": 32}
    assert stored(model) == {
        "qkv_proj": attention,
        "o_proj": attention,
        "gate_up_proj": all_layers,
        "down_proj": all_layers,
    }
    q_k_v_o = 2 * (4096 * (4096 + 2 * 1024) + 4096 * 4096)
    whole = read(LLAMA, quantization_config=NVFP4)
    extra_bytes = model.weight_bytes_per_rank() - whole.weight_bytes_per_rank()
    assert extra_bytes == pytest.approx(q_k_v_o * (2 - 0.5625))


def test_a_wildcard_after_a_layer_names_that_layer_alone():
    """Model Optimizer matches wildcards (fnmatch): the dot is a dot, and layers 10 to 19 are not layer 1."""
    model = read(LLAMA, quantization_config=NVFP4 | {"exclude_modules": ["model.layers.1.*", "lm_head"]})
    assert {name: found["bf16"] for name, found in stored(model).items()} == {
        "qkv_proj": 1,
        "o_proj": 1,
        "gate_up_proj": 1,
        "down_proj": 1,
    }


@pytest.mark.parametrize(
    ("left_out", "attention"),
    [
        (["lm_head", "*.mlp.gate"], "nvfp4"),
        (["*self_attn*"], "bf16"),
        (["self_attn"], "bf16"),
        (["vision_tower.layers.0.self_attn.o_proj", "model.visual*"], "nvfp4"),
        (["model.layers.1"], "nvfp4"),
        (["self_att"], "nvfp4"),
    ],
)
def test_attention_counts_in_16_bits_only_where_it_is_left_out(left_out, attention):
    found = stored(read(QWEN2_MOE, quantization_config=NVFP4 | {"ignore": left_out}))
    assert max(found["qkv_proj"], key=found["qkv_proj"].get) == attention
    assert max(found["expert_down_proj"], key=found["expert_down_proj"].get) == "nvfp4"
    assert max(found["shared_down_proj"], key=found["shared_down_proj"].get) == "nvfp4"


def test_of_matrices_that_engines_join_the_widest_format_counts():
    found = stored(read(LLAMA, quantization_config=NVFP4 | {"ignore": ["*.k_proj"]}))
    assert found["qkv_proj"] == {"bf16": 32}
    assert found["o_proj"] == {"nvfp4": 32}


def test_groups_of_compressed_tensors_have_formats_of_their_own():
    groups = {
        "attention": {"targets": ["re:.*self_attn.*"], "weights": FP8, "input_activations": FP8},
        "others": {
            "targets": ["Linear"],
            "weights": {"type": "float", "num_bits": 4, "group_size": 16},
            "input_activations": {"type": "float", "num_bits": 4},
            "format": "nvfp4-pack-quantized",
        },
    }
    config = CT | {"format": "mixed-precision", "config_groups": groups, "ignore": ["lm_head"]}
    model = read(LLAMA, quantization_config=config)
    assert model.weights == "nvfp4"
    assert stored(model)["qkv_proj"] == {"fp8": 32}
    assert stored(model)["down_proj"] == {"nvfp4": 32}


def test_formats_per_layer_of_model_optimizer():
    """As in Qwen3.6-35B-A3B-NVFP4: experts and LM head W4A16, linear and full attention in FP8."""
    layers = {"lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    for n in range(QWEN3_NEXT["num_hidden_layers"]):
        prefix = f"model.language_model.layers.{n}"
        layers[f"{prefix}.mlp.experts"] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        for name in ("in_proj_qkvz", "out_proj"):
            layers[f"{prefix}.linear_attn.{name}"] = {"quant_algo": "FP8"}
        for name in "qkvo":
            layers[f"{prefix}.self_attn.{name}_proj"] = {"quant_algo": "FP8"}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    model = read(QWEN3_NEXT, quantization_config=config)
    assert (model.weights, model.moe_weights, model.lm_head_weights) == ("fp8", "nvfp4_wo", "nvfp4_wo")
    found = stored(model)
    assert set(found["in_proj_qkvz"]) == set(found["qkv_proj"]) == set(found["o_proj"]) == {"fp8"}
    assert set(found["expert_gate_up_proj"]) == {"nvfp4_wo"}
    assert set(found["shared_down_proj"]) == {"bf16"}


def test_a_single_expert_may_be_named():
    """The list of MiniMax-M3-NVFP4 names each expert's matrices."""
    layers = {
        f"model.layers.{n}.mlp.experts.{expert}.{name}_proj": {"quant_algo": "NVFP4", "group_size": 16}
        for n in range(QWEN2_MOE["num_hidden_layers"])
        for expert in range(2)
        for name in ("gate", "up", "down")
    }
    config = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    model = read(QWEN2_MOE, quantization_config=config)
    assert (model.weights, model.moe_weights) == (None, "nvfp4")


def test_an_fp8_checkpoint_keeps_its_blocks_beside_the_layers_that_model_optimizer_converted():
    """As in DeepSeek-V4-NVFP4: experts in NVFP4, attention and shared experts in the original's FP8."""
    layers = {f"layers.{n}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for n in range(3, 61)}
    config = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
    }
    model = read(DEEPSEEK_V3, quantization_config=config)
    assert (model.weights, model.moe_weights) == ("fp8_block", "nvfp4")
    assert {block.formats for block in model.blocks} == {()}


def test_experts_of_four_bits_beside_fp8():
    """DeepSeek-V4 says expert_dtype beside its quantization_config."""
    model = read({**DEEPSEEK_V3, "expert_dtype": "fp4"})
    assert (model.weights, model.moe_weights) == ("fp8_block", "mxfp4_mxfp8")
    with pytest.raises(ValueError, match='expert_dtype="fp3": cannot be priced; known: fp4, fp8'):
        read({**DEEPSEEK_V3, "expert_dtype": "fp3"})


def test_rules_of_gptqmodel_change_bits_and_leave_modules_out():
    dynamic = {"-:.*layers\\.0\\..*": {}, "+:.*\\.down_proj": {"bits": 8, "group_size": 64}}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic, "lm_head": True}
    model = read(LLAMA, quantization_config=config)
    assert (model.weights, model.lm_head_weights) == ("int4_wo", "int4_wo")
    assert stored(model)["down_proj"] == {"bf16": 1, "int8_wo_g64": 31}
    assert stored(model)["qkv_proj"] == {"bf16": 1, "int4_wo": 31}


def test_gptq_may_name_the_modules_that_it_quantises():
    inside = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
    config = {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": inside}
    found = stored(read(LLAMA, quantization_config=config))
    assert found["qkv_proj"] == found["o_proj"] == {"int4_wo": 32}
    assert found["down_proj"] == {"bf16": 32}


@pytest.mark.parametrize("name", ["model.layers.3.mlp.down_proj", ".*layers.3.mlp.down_proj"])
def test_auto_round_names_single_layers(name):
    config = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "extra_config": {name: {"bits": 16}},
    }
    found = stored(read(LLAMA, quantization_config=config))
    assert found["down_proj"] == {"bf16": 1, "int4_wo": 31}
    assert found["gate_up_proj"] == {"int4_wo": 32}


def test_other_quantisers_name_single_layers():
    quark = {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}},
        "layer_quant_config": {"*self_attn*": {"weight": {"dtype": "fp8_e4m3"}}},
        "exclude": ["re:model.layers.0.mlp.*", "lm_head"],
    }
    found = stored(read(LLAMA, quantization_config=quark))
    assert found["o_proj"] == {"fp8_wo": 32}
    assert found["down_proj"] == {"bf16": 1, "mxfp4": 31}
    by_name = {
        "_default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128}},
        "model.layers.0.mlp": None,
    }
    kind = {"_type": "ModuleFqnToConfig", "_data": {"module_fqn_to_config": by_name}}
    torchao = {"quant_method": "torchao", "quant_type": {"default": kind}}
    found = stored(read(LLAMA, quantization_config=torchao))
    assert found["down_proj"] == {"bf16": 1, "int4_wo": 31}
    params = {"weight_quant_params": {"nbits": 4, "group_size": 64}}
    hqq = {"quant_method": "hqq", "quant_config": {"self_attn.q_proj": params, "self_attn.o_proj": params}}
    found = stored(read(LLAMA, quantization_config=hqq))
    assert found["o_proj"] == {"int4_wo_g64": 32}
    assert found["qkv_proj"] == {"bf16": 32}


def test_w4afp8_quantises_experts_otherwise():
    model = read({**DEEPSEEK_V3, "quantization_config": {"quant_method": "w4afp8", "group_size": 128}})
    assert (model.weights, model.moe_weights) == ("fp8", "int4_fp8")


def test_mxfp4_is_that_of_experts_alone():
    model = read(GPT_OSS)
    assert (model.weights, model.moe_weights) == (None, "mxfp4")
    with pytest.raises(ValueError, match="quantization_config: the formats that it names are of no matrix"):
        read(LLAMA, quantization_config={"quant_method": "mxfp4"})


def test_layers_of_one_kind_stay_one_block():
    model = read(LLAMA, quantization_config=CT | group("int", 4, group_size=128) | {"ignore": ["lm_head"]})
    assert [block.count for block in model.blocks] == [32]
