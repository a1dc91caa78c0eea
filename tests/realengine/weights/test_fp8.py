"""Checkpoints with FP8 weights: scales per tensor, per output and per block, dequantised or kept."""

import json

import pytest
import torch
from safetensors.torch import save_file

from kernels.w8a8 import ScaledTensor
from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.weights.load import load_weights
from tests.realengine.checkpoints import LLAMA, QWEN3_MOE, random_checkpoint, write_config

FP8 = torch.float8_e4m3fn
CONFIGS = {
    "llama": LLAMA | {"hidden_size": 160, "intermediate_size": 192},
    "qwen3_moe": QWEN3_MOE | {"hidden_size": 160, "intermediate_size": 192, "moe_intermediate_size": 136},
}


def quantised(weight, kind):
    """Returns (FP8 numbers, scales as stored, the weight that they stand for)."""
    if kind == "block":
        rows, columns = (-(-size // 128) for size in weight.shape)
        padded = torch.zeros(rows * 128, columns * 128)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        blocks = padded.view(rows, 128, columns, 128)
        scales = blocks.abs().amax((1, 3)) / 448
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
    else:
        dims = (1,) if kind == "channel" else (0, 1)
        wide = scales = weight.abs().amax(dims, keepdim=True) / 448
        if kind == "tensor":
            scales = scales.reshape(())
    codes = (weight / wide).to(FP8)
    return codes, scales, codes.float() * wide


def write(folder, config, kind):
    """Writes a checkpoint in FP8; returns the tensors that it stands for."""
    stored, meant = {}, {}
    for name, tensor in random_checkpoint(config).items():
        meant[name] = stored[name] = tensor
        if name.endswith("proj.weight"):
            codes, scales, meant[name] = quantised(tensor, kind)
            stored[name] = codes
            stored[name + ("_scale_inv" if kind == "block" else "_scale")] = scales
            stored[name.removesuffix("weight") + "input_scale"] = torch.ones(())
    save_file(stored, folder / "model.safetensors")
    described = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    described |= {"weight_block_size": [128, 128]} if kind == "block" else {}
    write_config(folder, config | {"quantization_config": described})
    return meant


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_the_stored_numbers_times_their_scales(name, kind, world_size, tmp_path):
    (tmp_path / "plain").mkdir()
    meant = write(tmp_path, CONFIGS[name], kind)
    save_file(meant, tmp_path / "plain" / "model.safetensors")
    write_config(tmp_path / "plain", CONFIGS[name])
    for rank in range(world_size):
        found, wanted = (
            load_weights(
                folder,
                Architecture.from_path(folder),
                torch.float32,
                "cpu",
                rank=rank,
                world_size=world_size,
            )
            for folder in (tmp_path, tmp_path / "plain")
        )
        assert found.keys() == wanted.keys()
        for each, weight in found.items():
            assert torch.equal(weight, wanted[each]), each


@pytest.mark.parametrize("kind", ["tensor", "channel"])
def test_quantization_fp8_keeps_the_stored_numbers(kind, tmp_path):
    meant = write(tmp_path, CONFIGS["llama"], kind)
    spec = Architecture.from_path(tmp_path)
    weights = load_weights(tmp_path, spec, torch.float32, "cpu", quantization="fp8")
    qkv = weights["layers.1.qkv.weight"]
    assert isinstance(qkv, ScaledTensor)
    names = [f"model.layers.1.self_attn.{of}_proj.weight" for of in "qkv"]
    wanted = torch.cat([meant[name] for name in names])
    assert torch.equal(qkv.values_RK.float() * qkv.scales_R[:, None], wanted)


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("kind", ["tensor", "block"])
def test_an_engine_serves_it(kind, quantization, tmp_path):
    write(tmp_path, CONFIGS["llama"], kind)
    llm = LLM(tmp_path, device="cpu", num_kv_blocks=20, quantization=quantization)
    (output,) = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"must be \[128, 128\]"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "supported: type float with num_bits 8",
        ),
        ({"quant_method": "bitsandbytes"}, "supported: plain weights, fp8, awq, gptq"),
    ],
)
def test_other_formats_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Architecture.from_hf(LLAMA | {"quantization_config": change})


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, "is F8_E4M3 without weight_scale or weight_scale_inv beside it"),
        (torch.ones(3), r"is \[3\], must be one scale, one for each of 160 outputs, or \[2, 2\]"),
        (torch.tensor(float("nan")), "contains infinite numbers or NaN"),
    ],
)
def test_wrong_scales_are_refused_with_file_and_tensor(scale, message, tmp_path):
    tensors = random_checkpoint(CONFIGS["llama"])
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(FP8)
    if scale is not None:
        tensors[f"{name}_scale"] = scale
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    with pytest.raises(ValueError, match=message):
        load_weights(tmp_path, Architecture.from_path(tmp_path), torch.float32, "cpu")
