"""Every shipped model and device builds, says where its figures come from, and has them right."""

import re
from pathlib import Path

import pytest

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ALL_PRESETS = sorted([*(CONFIGS / "model").glob("*.yaml"), *(CONFIGS / "hardware").glob("*.yaml")])

PUBLISHED_PARAMETERS = {
    "llama2_7b": 6.74e9,
    "llama2_13b": 13.0e9,
    "llama2_70b": 69.0e9,
    "llama3_1_8b": 8.03e9,
    "llama3_1_70b": 70.6e9,
    "qwen2_5_7b": 7.62e9,
    "qwen2_5_72b": 72.7e9,
    "qwen3_8b": 8.19e9,
    "qwen3_32b": 32.8e9,
    "mistral_7b": 7.25e9,
    "smollm2_135m": 134.5e6,
}
DENSE_BF16 = {
    "a100_40gb_sxm": 312e12,
    "a100_80gb_sxm": 312e12,
    "h100_sxm": 989.4e12,
    "h100_pcie": 756.5e12,
    "h200_sxm": 989.4e12,
    "b200_sxm": 2250e12,
    "l40s": 362.05e12,
    "l4": 121e12,
    "a10g": 70e12,
    "rtx_4090": 165.2e12,
    "mi300x": 1307.4e12,
}


@pytest.mark.parametrize("path", ALL_PRESETS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_preset_names_its_source(path):
    assert re.search(r"^(# )?source: \S", path.read_text(), re.MULTILINE)


def test_every_device_names_the_source_of_its_price(devices):
    assert all(re.search(r"20\d\d", device.price_source) for device in devices.values())


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameter_count_is_within_a_percent_of_the_published_one(models, name):
    assert models[name].num_parameters == pytest.approx(PUBLISHED_PARAMETERS[name], rel=0.01)


def test_parameter_counts_of_all_model_presets_are_checked(models):
    assert models.keys() == PUBLISHED_PARAMETERS.keys()


def test_bf16_peaks_are_dense(devices):
    peaks = {name: device.peak_flops_per_s.get("bf16") for name, device in devices.items()}
    assert peaks == {**DENSE_BF16, "t4": None}


def test_a_bf16_checkpoint_runs_in_fp16_on_a_t4(devices):
    assert devices["t4"].compute_dtype("bf16") == "fp16"
    assert devices["a100_80gb_sxm"].compute_dtype("bf16") == "bf16"
