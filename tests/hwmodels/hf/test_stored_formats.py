"""Formats of weights, keys and values that a config.json states, for each quantiser."""

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.hf.config import from_hf_fields
from hwmodels.hf.quantization import MODELOPT
from hwmodels.hf.quantizers import NOT_PRICED, READERS
from hwmodels.model.weights import WEIGHT_FORMATS, weight_format
from tests.hwmodels.hf.published import DEEPSEEK_V3, GPT_OSS, LLAMA, QWEN2_MOE, group, read

FP8, INT8, FP4 = ({"type": kind, "num_bits": bits} for kind, bits in (("float", 8), ("int", 8), ("float", 4)))
CT = {"quant_method": "compressed-tensors"}
TORCHAO = {"quant_method": "torchao"}
QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
QUARK_FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}


@pytest.mark.parametrize(
    ("quantization", "weights"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4_wo"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "gemm"}, "int4_wo_g64"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "int4_wo"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4_wo_g32"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8_wo"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "int3_wo"),
        ({"bits": 4, "group_size": 128, "desc_act": False}, "int4_wo"),  # before quant_method was written
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}, "int4_wo"),
        ({"quant_method": "auto-round", "bits": 2, "group_size": 64}, "int2_wo_g64"),
        ({"quant_method": "auto-round", "bits": 8, "act_bits": 8, "group_size": -1}, "int8"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp", "act_bits": 4}, "mxfp4_mxfp4"),
        ({"quant_method": "auto-round", "bits": 8, "data_type": "mx_fp", "act_bits": 8}, "mxfp8"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "nv_fp", "act_bits": 4}, "nvfp4"),
        ({"quant_method": "auto-round", "bits": 8, "data_type": "fp", "act_bits": 8}, "fp8"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, "mxfp8"),
        ({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, "mxfp8"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "nvfp4"),
        ({"producer": {"name": "modelopt"}, "quant_algo": "FP8", "ignore": ["lm_head"]}, "fp8"),
        ({"quant_algo": "fp8_pb_wo"}, "fp8_block"),
        ({"quant_algo": "W4A16_AWQ", "group_size": 64}, "int4_wo_g64"),
        (CT | group("float", 8, activations=FP8), "fp8"),
        (CT | group("float", 8), "fp8_wo"),
        (CT | group("float", 8, strategy="block", activations=FP8), "fp8_block"),
        (CT | group("float", 8, group_size=32, activations=FP8), "mxfp8"),
        (CT | group("float", 4, group_size=16, activations=FP4), "nvfp4"),
        (CT | group("float", 4, group_size=16), "nvfp4_wo"),
        (CT | group("float", 4, group_size=16, activations=FP8), "nvfp4_fp8"),
        (CT | group("float", 4, group_size=32), "mxfp4"),
        (CT | group("float", 4, group_size=32, activations=FP8), "mxfp4_mxfp8"),
        (CT | group("int", 8, activations=INT8), "int8"),
        (CT | group("int", 8), "int8_wo"),
        (CT | group("int", 4, group_size=128), "int4_wo"),
        (CT | group("int", 4, group_size=32, symmetric=True), "int4_wo_s32"),
        (CT | group("int", 4, group_size=32, symmetric=False), "int4_wo_g32"),
        (CT | group("int", 4, strategy="channel"), "int4_wo"),
        (CT | group("int", 4, group_size=128, activations=INT8), "int4_int8"),
        (CT | group("int", 4, group_size=128, activations=FP8), "int4_fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "nf4_double"),
        ({"quant_method": "quark", "global_quant_config": {"weight": QUARK_FP8}}, "fp8_wo"),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": QUARK_FP8, "input_tensors": QUARK_FP8},
            },
            "fp8",
        ),
        ({"global_quant_config": {"weight": QUARK_FP4, "input_tensors": QUARK_FP4}}, "mxfp4_mxfp4"),
        ({"global_quant_config": {"weight": QUARK_FP4, "input_tensors": QUARK_FP8}}, "mxfp4_mxfp8"),
        ({"global_quant_config": {"weight": QUARK_FP4}}, "mxfp4"),
        ({"global_quant_config": {"weight": QUARK_FP4 | {"dtype": "fp4_e2m1"}}}, "mxfp4"),
        ({"global_quant_config": {"weight": {"dtype": "uint4", "group_size": 128}}}, "int4_wo"),
        (
            {"global_quant_config": {"weight": [QUARK_FP8, {"dtype": "int4"}], "input_tensors": QUARK_FP8}},
            "int4_fp8",
        ),
        (TORCHAO | {"quant_type": "int8_weight_only"}, "int8_wo"),
        (
            TORCHAO | {"quant_type": "int4_weight_only", "quant_type_kwargs": {"group_size": 32}},
            "int4_wo_g32",
        ),
        (
            TORCHAO
            | {
                "quant_type": {"default": {"_type": "Float8DynamicActivationFloat8WeightConfig", "_data": {}}}
            },
            "fp8",
        ),
        (
            {
                "quant_method": "hqq",
                "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}},
                "skip_modules": ["lm_head"],
            },
            "int4_wo_g64",
        ),
        ({"quant_method": "eetq", "weights": "int8"}, "int8_wo"),
        ({"quant_method": "quanto", "weights": "float8"}, "fp8_wo"),
        ({"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}, "ternary"),
        ({"quant_method": "fp_quant", "forward_dtype": "nvfp4"}, "nvfp4"),
        ({"quant_method": "w8a8_int8"}, "int8"),
        ({"quant_method": "qqq"}, "int4_int8"),
    ],
)
def test_reads_how_a_checkpoint_is_quantised(quantization, weights):
    model = read(LLAMA, quantization_config=quantization)
    assert (model.weights, model.moe_weights, model.lm_head_weights, model.notes) == (weights, None, None, ())
    assert {block.formats for block in model.blocks} == {()}


@pytest.mark.parametrize(
    ("quantization", "weights", "note"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8_wo", "LLM.int8() is priced as"),
        (
            {
                "quant_method": "aqlm",
                "in_group_size": 8,
                "out_group_size": 1,
                "num_codebooks": 1,
                "nbits_per_codebook": 16,
            },
            "int2_wo",
            "its kernels look up codebooks",
        ),
        (
            {"quant_method": "higgs", "bits": 4, "group_size": 256},
            "int4_wo_g256",
            "its kernels look up a grid",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            "fp8_block",
            "blocks of 128 x 128 weights, the checkpoint's are 64 x 64",
        ),
        (
            CT | group("float", 8, activations=FP8) | {"sparsity_config": {"sparsity_structure": "2:4"}},
            "fp8",
            "2:4 sparsity of the checkpoint is not counted",
        ),
    ],
)
def test_formats_that_are_priced_as_others_say_so(quantization, weights, note):
    model = read(LLAMA, quantization_config=quantization)
    assert model.weights == weights
    assert note in model.notes[0]


def test_every_algorithm_of_model_optimizer_is_a_known_format():
    for algorithm, name in MODELOPT.items():
        model = read(LLAMA, quantization_config={"quant_method": "modelopt", "quant_algo": algorithm})
        assert model.weights == name


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "my_quant", "bits": 4},
            'quantization_config.quant_method="my_quant": cannot be priced; known: awq, ',
        ),
        (
            {"quant_method": "vptq"},
            'quantization_config.quant_method="vptq": cannot be priced, since its weights are looked up in',
        ),
        ({"bits": 4}, "quantization_config.quant_method=null: cannot be priced"),
        ([4], "quantization_config=[4]: must be an object with a quant_method"),
        (
            CT | {"config_groups": {"a": {"weights": 4}}},
            "quantization_config.config_groups.a.weights=4: must be an object",
        ),
        ({"quant_method": "awq", "bits": [4]}, "quantization_config.bits=[4]: must be 2, 3, 4 or 8 for awq"),
        ({"quant_method": "awq"}, "quantization_config.bits=null: must be 2, 3, 4 or 8 for awq"),
        ({"quant_method": "gptq", "bits": 5}, "quantization_config.bits=5: must be 2, 3, 4 or 8 for gptq"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": "128"},
            'quantization_config.group_size="128": must be a whole number of weights',
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 5}}},
            'quantization_config.dynamic["+:.*down.*"].bits=5: must be 2, 3, 4 or 8',
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"-:(a+)+b": {}}},
            'quantization_config.dynamic["-:(a+)+b"]="re:(a+)+b": must have at most 6 repetitions',
        ),
        (
            CT | group("int", 4) | {"ignore": ["re:("]},
            'quantization_config.modules_to_not_convert="re:(": is no regular expression',
        ),
        (CT | group("int", 4) | {"ignore": [4]}, "quantization_config.ignore=[4]: must be a list of names"),
        ({"quant_method": "modelopt"}, "quantization_config.quant_algo=null: cannot be priced; known: FP8,"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8"},
            'quantization_config.quant_algo="W4A8": cannot be priced; known: FP8,',
        ),
        (
            {"quant_algo": "MIXED_PRECISION"},
            "quantization_config.quantized_layers=null: must name the format of each layer",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_heads.0": {"quant_algo": "FP8"}}},
            "quantization_config: the formats that it names are of no matrix of this model",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": 128},
            "quantization_config.weight_block_size=128: must be two whole numbers, such as [128, 128]",
        ),
        (CT, "quantization_config.config_groups=null: must hold at least one group"),
        (
            CT | group("int", 5, activations=INT8),
            'config_groups.group_0: type="int", num_bits=5 with activations of type="int", num_bits=8 cannot',
        ),
        (
            CT | {"config_groups": {"a": {"targets": ["Linear"], "weights": INT8}, "b": {"weights": FP8}}},
            "quantization_config.config_groups: fp8_wo and int8_wo for the same targets cannot be priced",
        ),
        (
            CT | {"config_groups": {"a": {"targets": ["Conv2d"], "weights": INT8}}},
            'quantization_config.config_groups.a.targets=["Conv2d"]: must be Linear',
        ),
        ({"quant_method": "bitsandbytes"}, "quantization_config.load_in_4bit=null: must be true"),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
            'quantization_config.bnb_4bit_quant_type="int4": must be nf4 or fp4',
        ),
        ({"quant_method": "quark"}, "quantization_config.global_quant_config=null: must be an object"),
        (
            {"global_quant_config": {"weight": {"dtype": "fp2"}}},
            'quantization_config.global_quant_config.weight.dtype="fp2": cannot be priced',
        ),
        (TORCHAO | {"quant_type": "autoquant"}, 'quantization_config.quant_type="autoquant": cannot be'),
        ({"quant_method": "hqq"}, "quantization_config.quant_config=null: must hold weight_quant_params"),
        (
            {"quant_method": "quanto", "weights": "int3"},
            'quantization_config.weights="int3": cannot be priced',
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "data_type": "fp"},
            'quantization_config.data_type="fp": cannot be priced with bits=4',
        ),
        (
            {
                "quant_method": "aqlm",
                "in_group_size": 8,
                "num_codebooks": 1,
                "nbits_per_codebook": 12,
            },
            "quantization_config.nbits_per_codebook=12: makes 1.5 bits per weight, which cannot be priced",
        ),
    ],
)
def test_what_names_a_format_and_is_not_known_is_an_error_with_the_key(quantization, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(LLAMA, quantization_config=quantization)


def test_methods_are_priced_or_refused_with_the_reason_and_none_is_both():
    assert not set(READERS) & set(NOT_PRICED)
    for method in NOT_PRICED:
        with pytest.raises(ValueError, match=rf'quant_method="{method}": cannot be priced, since .*'):
            read(LLAMA, quantization_config={"quant_method": method})


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8}}, "fp8"),
        ({"kv_cache_scheme": "FP8"}, "fp8"),
        ({"kv_cache_scheme": None}, "auto"),
        ({"kv_cache_scheme": {"type": "int", "num_bits": 8}}, "int8"),
        ({"kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"kv_cache_quant_algo": "INT8"}, "int8"),
        ({"kv_cache_quant_algo": "auto"}, "auto"),
        ({"kv_cache_quant_algo": None}, "auto"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "fp8"),
    ],
)
def test_keys_and_values_are_stored_as_the_checkpoint_says(given, dtype):
    config = {"quant_method": "modelopt", "quant_algo": "FP8"} | given
    model = read(LLAMA, quantization_config=config)
    assert (model.weights, model.kv_cache_dtype, model.notes) == ("fp8", dtype, ())
    asked = from_hf_fields({**LLAMA, "quantization_config": config}, name="model", kv_cache_dtype="bf16")
    assert asked.kv_cache_dtype == "bf16"


def test_compressed_tensors_and_quark_describe_keys_and_values_as_outputs():
    outputs = {"targets": ["re:.*k_proj", "re:.*v_proj"], "weights": None, "output_activations": FP8}
    groups = group("int", 4, group_size=128)["config_groups"] | {"kv": outputs}
    assert read(LLAMA, quantization_config=CT | {"config_groups": groups}).kv_dtype == "fp8"
    outputs = {"*k_proj": {"output_tensors": QUARK_FP8}, "*v_proj": {"output_tensors": QUARK_FP8}}
    config = {"global_quant_config": {"weight": QUARK_FP8}, "kv_cache_quant_config": outputs}
    assert read(LLAMA, quantization_config=config).kv_dtype == "fp8"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_cache_quant_algo": "FP6"}, 'quantization_config.kv_cache_quant_algo="FP6": is not known'),
        (
            {"kv_cache_scheme": {"type": "int", "num_bits": 2}},
            'quantization_config.kv_cache_scheme={"type": "int", "num_bits": 2}: is not known',
        ),
    ],
)
def test_other_ways_of_storing_keys_and_values_are_refused_unless_the_user_says_how(given, message):
    config = {"quant_method": "modelopt", "quant_algo": "FP8", **given}
    with pytest.raises(ValueError, match=re.escape(message)):
        read(LLAMA, quantization_config=config)
    fields = {**LLAMA, "quantization_config": config}
    assert from_hf_fields(fields, name="model", kv_cache_dtype="fp8").kv_dtype == "fp8"


def test_keys_and_values_alone_may_be_quantised():
    model = read(LLAMA, quantization_config={"quant_algo": None, "kv_cache_quant_algo": "FP8"})
    assert (model.weights, model.kv_cache_dtype) == (None, "fp8")


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


def test_a_format_that_the_user_chooses_replaces_one_that_is_not_known():
    fields = {**LLAMA, "quantization_config": {"quant_method": "vptq"}}
    model = from_hf_fields(fields, name="model", weights="int2_wo")
    assert model.weights == "int2_wo"
    assert model.notes[0].startswith(
        "weights are stored as model.weights says; the checkpoint's are not known"
    )


KEYS = """
bits w_bit group_size dynamic lm_head modules_in_block_to_quantize extra_config data_type act_bits
quant_config num_codebooks nbits_per_codebook load_in_4bit bnb_4bit_quant_type weight_block_size
quantized_layers quantization quant_algo kv_cache_quant_algo kv_cache_scheme config_groups
sparsity_config global_quant_config quant_type layer_quant_config layer_type_quant_config
kv_cache_quant_config weights forward_dtype producer ignore modules_to_not_convert
"""
LEAVES = st.sampled_from([None, True, 0, -1, 4, 8, 1.5, "", "FP8", "MIXED_PRECISION", "re:(", "*", "weights"])
NAMES = st.sampled_from(["a", "weights", "default", "_type", "num_bits", "type", "re:x", "quant_algo"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


@given(
    method=st.sampled_from([*READERS, "x"]),
    fields=st.dictionaries(st.sampled_from(KEYS.split()), VALUES, max_size=4),
)
def test_any_description_is_read_or_refused(method, fields):
    config = {**QWEN2_MOE, "num_hidden_layers": 2, "quantization_config": {"quant_method": method, **fields}}
    with contextlib.suppress(ValueError):
        assert read(config).weight_bytes_per_rank() > 0


def test_groups_of_weights_count_their_scales():
    assert weight_format("int4_wo_g32").bytes_per_weight == 0.5 + 2.5 / 32
    assert weight_format("int4_wo_s32").bytes_per_weight == 0.5 + 2 / 32
    assert weight_format("int4_wo_g128").bytes_per_weight == WEIGHT_FORMATS["int4_wo"].bytes_per_weight
    for name in ("fp8_g32", "int4_wo_g0", "int4_wo_g", "int4_wo_x32"):
        with pytest.raises(ValueError, match=rf"weights={name}: must be one of .*int4_wo_g32"):
            weight_format(name)
