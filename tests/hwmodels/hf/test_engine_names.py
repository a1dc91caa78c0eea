"""Names of engines for quantised weights."""

import json
import re

import pytest

from hwmodels.hf.config import from_hf_config, from_hf_fields
from hwmodels.hf.quantization import ENGINE_NAMES, REFUSED
from tests.hwmodels.hf.published import DEEPSEEK_V3, GPT_OSS, LLAMA, QWEN2_MOE, group

VLLM_0_32 = [
    "awq",
    "auto_awq",
    "fp8",
    "fbgemm_fp8",
    "fp_quant",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mxfp8",
    "modelopt_mixed",
    "auto_gptq",
    "gptq",
    "gptq_marlin",
    "awq_marlin",
    "humming",
    "compressed-tensors",
    "experts_int8",
    "quark",
    "moe_wna16",
    "torchao",
    "inc",
    "mxfp4",
    "gpt_oss_mxfp4",
    "deepseek_v4_fp8",
    "online",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "nvfp4_per_token",
    "mxfp8",
]
"""QUANTIZATION_METHODS of vLLM 0.32.0 (model_executor/layers/quantization/__init__.py)."""

EARLIER_VLLM = [
    "aqlm",
    "bitsandbytes",
    "deepspeedfp",
    "tpu_int8",
    "ptpc_fp8",
    "marlin",
    "bitblas",
    "gguf",
    "gptq_marlin_24",
    "gptq_bitblas",
    "qqq",
    "hqq",
    "neuron_quant",
    "ipex",
    "auto-round",
    "petit_nvfp4",
    "cpu_awq",
    "squeezellm",
]
"""Names that versions before 0.32 had."""

SGLANG = [
    "fp8",
    "mxfp8",
    "blockwise_int8",
    "modelopt",
    "modelopt_fp8",
    "modelopt_fp4",
    "nvfp4_online",
    "modelopt_mixed",
    "w8a8_int8",
    "w8a8_fp8",
    "awq",
    "awq_marlin",
    "bitsandbytes",
    "gguf",
    "gptq",
    "gptq_marlin",
    "moe_wna16",
    "compressed-tensors",
    "w4afp8",
    "petit_nvfp4",
    "quark",
    "quark_mxfp4",
    "auto-round",
    "auto-round-int8",
    "modelslim",
    "quark_int4fp8_moe",
    "humming",
    "mxfp_w4a8",
    "mxfp4",
    "qoq",
]
"""--quantization of SGLang 0.5."""

TENSORRT_LLM = [
    "w8a16",
    "w4a16",
    "w4a16_awq",
    "w4a8_awq",
    "w8a16_gptq",
    "w4a16_gptq",
    "w8a8_sq_per_channel",
    "fp8",
    "fp8_per_channel_per_token",
    "fp8_block_scales",
    "int8",
    "nvfp4",
    "w4a8_nvfp4_fp8",
    "w4a8_mxfp4_fp8",
    "w4a8_mxfp4_mxfp8",
    "w4a16_mxfp4",
]
"""quant_algo of TensorRT-LLM, in lower case."""

SAYS_NO_FORMAT = {
    "fp_quant",
    "modelopt_mixed",
    "humming",
    "compressed-tensors",
    "quark",
    "torchao",
    "inc",
    "online",
    "hqq",
}


def published(config, name):
    return from_hf_fields(config, name="m", weights=name)


def given(tmp_path, config, name=None):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return from_hf_config(str(tmp_path), weights=name)


@pytest.mark.parametrize("name", sorted({*VLLM_0_32, *EARLIER_VLLM, *SGLANG, *TENSORRT_LLM}))
def test_each_name_of_an_engine_has_a_price_or_is_refused_with_what_to_do(name):
    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"weights={name}: cannot be priced, since .*; nearest: \w+"):
            published(QWEN2_MOE, name)
    elif name in SAYS_NO_FORMAT:
        with pytest.raises(
            ValueError, match=rf"weights={name}: does not say the format.*or a format: fp8, int8"
        ):
            published(QWEN2_MOE, name)
    else:
        model, plain = published(QWEN2_MOE, name), published(QWEN2_MOE, None)
        assert model.weight_bytes_per_rank() < plain.weight_bytes_per_rank()


def test_the_nearest_name_has_a_price():
    for _, nearest in REFUSED.values():
        assert published(LLAMA, nearest).weights is not None


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"weights=awq_marlyn: must be one of fp32, .*; nearest: awq_marlin"):
        published(LLAMA, "awq_marlyn")
    with pytest.raises(ValueError, match=r"weights=compressed_tensors: .*; nearest: compressed-tensors"):
        published(LLAMA, "compressed_tensors")


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("fp8", ("fp8", None)),
        ("fp8_per_block", ("fp8_block", None)),
        ("mxfp8", ("mxfp8", None)),
        ("bitsandbytes", ("nf4", None)),
        ("experts_int8", (None, "int8_wo")),
        ("nvfp4_per_token", (None, "nvfp4")),
    ],
)
def test_engines_quantise_16_bits_online(tmp_path, name, formats):
    for model in (published(QWEN2_MOE, name), given(tmp_path, QWEN2_MOE, name)):
        assert (model.weights, model.moe_weights, model.notes) == (*formats, ())


def test_what_quantises_experts_alone_needs_some():
    with pytest.raises(ValueError, match="weights=nvfp4_per_token: quantises experts alone, and m has none"):
        published(LLAMA, "nvfp4_per_token")


def test_a_published_model_may_be_a_checkpoint_in_that_format(tmp_path):
    model = published(LLAMA, "awq_marlin")
    assert model.weights == "int4_wo"
    assert model.notes == ("weights in int4_wo: those of a checkpoint of m that is quantised for awq_marlin",)
    replaced = published(DEEPSEEK_V3, "modelopt_fp4")
    assert (replaced.weights, replaced.moe_weights) == ("nvfp4", None)
    message = (
        "weights=awq_marlin: the checkpoint is not quantised, and engines load awq_marlin from one that is; "
        "set weights=int4_wo to price such a checkpoint, or fp8, which engines make of 16 bits"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        given(tmp_path, LLAMA, "awq_marlin")
    assert given(tmp_path, LLAMA, "int4_wo").weights == "int4_wo"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "awq"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "awq_marlin"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "moe_wna16"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq_marlin"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_per_tensor"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*"]}, "modelopt_fp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*"]}, "modelopt"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*"]}, "nvfp4"),
        ({"quant_method": "compressed-tensors", **group("int", 4, group_size=32)}, "compressed-tensors"),
        ({"quant_method": "compressed-tensors", **group("int", 4, group_size=32)}, "int4_wo"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32}, "inc"),
        ({"load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_a_name_of_how_the_checkpoint_is_stored_leaves_it_as_it_is(tmp_path, config, name):
    quantised = {**LLAMA, "quantization_config": config}
    assert given(tmp_path, quantised, name) == given(tmp_path, quantised)
    assert published(quantised, name) == published(quantised, None)


def test_the_experts_of_gpt_oss_alone_are_in_mxfp4():
    for name in ("mxfp4", "gpt_oss_mxfp4", None):
        assert published(GPT_OSS, name).weights is None


@pytest.mark.parametrize("name", ["gptq", "fp8", "modelopt_fp4", "compressed-tensors", "bitsandbytes"])
def test_a_checkpoint_is_not_quantised_twice(tmp_path, name):
    quantised = {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}}
    if ENGINE_NAMES[name].weights == "int4_wo":  # AWQ's kernels and GPTQ's read the same format
        assert given(tmp_path, quantised, name).weights == "int4_wo"
        return
    message = f"weights={name}: the checkpoint is quantised already, by awq in int4_wo, and engines do not"
    with pytest.raises(ValueError, match=re.escape(message)):
        given(tmp_path, quantised, name)
