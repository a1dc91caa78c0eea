"""Formats of weights, keys and values that a config.json states."""

import re

import pytest

from hwmodels.hf.config import from_hf_fields
from tests.hwmodels.hf.published import DEEPSEEK_V3, GPT_OSS, LLAMA, QWEN2_MOE, group, read


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
