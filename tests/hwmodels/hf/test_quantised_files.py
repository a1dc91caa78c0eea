"""Files beside a config.json that say how its weights are stored, and real checkpoints' sizes."""

import json
import re

import pytest

from hwmodels.hf.config import from_hf_config
from hwmodels.hf.fields import mtp_bytes
from tests.hwmodels.hf.published import DEEPSEEK_V3, GPT_OSS, LLAMA, group, read

LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
MODELOPT_FP8 = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
MLP = ("gate", "up", "down")
UNQUANTISED_V3 = {key: value for key, value in DEEPSEEK_V3.items() if key != "quantization_config"}


def checkpoint(tmp_path, config, **files):
    """Writes a config.json and further JSON files; returns the model that they give."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, fields in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(fields))
    return from_hf_config(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "fields", "formats"),
    [
        ("hf_quant_config", MODELOPT_FP8, ("fp8", "fp8")),
        ("hf_quant_config", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, ("nvfp4", "auto")),
        (
            "hf_quant_config",
            {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
            (None, "fp8"),
        ),
        (
            "quantize_config",
            {"bits": 4, "group_size": 128, "desc_act": False, "sym": True},
            ("int4_wo", "auto"),
        ),
        ("quantize_config", {"bits": 8, "group_size": -1}, ("int8_wo", "auto")),
        (
            "quant_config",
            {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"},
            ("int4_wo_g64", "auto"),
        ),
        ("quant_config", {"quant_method": "hqq", "quant_config": {}}, None),
        (
            "quantization_config",
            {"quant_method": "compressed-tensors"} | group("int", 8),
            ("int8_wo", "auto"),
        ),
    ],
)
def test_a_file_beside_the_config_says_how_weights_are_stored(tmp_path, file, fields, formats):
    if formats is None:
        with pytest.raises(ValueError, match=re.escape(f"{file}.json: quant_config={{}}: must hold weight_")):
            checkpoint(tmp_path, LLAMA, **{file: fields})
        return
    model = checkpoint(tmp_path, LLAMA, **{file: fields})
    assert (model.weights, model.kv_cache_dtype) == formats
    assert model.notes == (f"number formats are those of {file}.json",)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (
            "hf_quant_config",
            {"quantization": {"quant_algo": "W3A3"}},
            'hf_quant_config.json: quantization.quant_algo="W3A3": cannot be priced',
        ),
        ("hf_quant_config", {}, "hf_quant_config.json: quant_algo=null: cannot be priced"),
        ("quantize_config", {"bits": 5}, "quantize_config.json: bits=5: must be 2, 3, 4 or 8 for gptq"),
        ("quant_config", {"w_bit": 1}, "quant_config.json: w_bit=1: must be 2, 3, 4 or 8 for awq"),
        ("quantization_config", {"bits": 4}, "quantization_config.json: quant_method=null: cannot be priced"),
    ],
)
def test_a_file_that_is_not_understood_is_never_read_as_bf16(tmp_path, file, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        checkpoint(tmp_path, LLAMA, **{file: fields})
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_the_formats_of_layers_may_be_in_a_file_of_tensorrt_llm(tmp_path):
    layers = {f"model.layers.{n}.mlp.{name}_proj": {"quant_algo": "FP8"} for n in range(32) for name in MLP}
    file = {"quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}}
    model = checkpoint(tmp_path, LLAMA, hf_quant_config=file, quant_cfg={"quantized_layers": layers})
    assert model.weights == "fp8"
    assert {name for block in model.blocks for name, _ in block.formats} == {"qkv_proj", "o_proj"}


def test_the_config_says_more_than_a_file_beside_it(tmp_path):
    inside = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = checkpoint(tmp_path, LLAMA | {"quantization_config": inside}, hf_quant_config=MODELOPT_FP8)
    assert (model.weights, model.kv_cache_dtype) == ("fp8_block", "fp8")
    (note,) = model.notes
    assert note.startswith("keys and values in fp8 as hf_quant_config.json says, which TensorRT-LLM reads")


def test_a_config_that_is_named_as_a_file_has_the_files_of_its_folder(tmp_path):
    checkpoint(tmp_path, LLAMA, hf_quant_config=MODELOPT_FP8)
    assert from_hf_config(str(tmp_path / "config.json")).weights == "fp8"


def test_an_fp8_70b_fits_one_h100(tmp_path):
    """nvidia/Llama-3.1-70B-Instruct-FP8: 67.7 GiB of weights; with bf16 they would be 131 GiB."""
    model = checkpoint(tmp_path, LLAMA_70B, hf_quant_config=MODELOPT_FP8)
    assert model.weight_bytes_per_rank() / 2**30 == pytest.approx(67.7, abs=0.05)


def test_nvfp4_of_deepseek_is_as_large_as_published(tmp_path):
    """nvidia/DeepSeek-V3.1-NVFP4 leaves the projections to latent vectors and back in bf16, not o_proj."""
    left_out = ["lm_head", "model.layers.61*"]
    for n in range(61):
        names = ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "q_b_proj")
        left_out += [f"model.layers.{n}.self_attn.{name}" for name in names]
    quantised = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    file = {"producer": {"name": "modelopt"}, "quantization": quantised | {"exclude_modules": left_out}}
    model = checkpoint(tmp_path, UNQUANTISED_V3, hf_quant_config=file)
    assert (model.weights, model.moe_weights, model.kv_cache_dtype) == (None, "nvfp4", "fp8")
    assert 350e9 < model.weight_bytes_per_rank() < 415e9
    # Its files hold the module of multi-token prediction in bf16.
    whole = round(model.weight_bytes_per_rank() + mtp_bytes(model))
    index = {"metadata": {"total_size": whole}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert from_hf_config(str(tmp_path)).notes == model.notes


def test_gpt_oss_is_as_large_as_its_files():
    """Index of openai/gpt-oss-20b: total_size 13,761,264,768."""
    assert read(GPT_OSS).weight_bytes_per_rank() == pytest.approx(13_761_264_768, rel=0.01)
