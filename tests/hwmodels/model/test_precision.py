"""Warnings about number formats that a device has no units for."""

from dataclasses import replace

import pytest

from hwmodels.assembly.roofline import Roofline
from hwmodels.model import precision_notes


def test_nothing_is_said_where_all_is_well(models, devices):
    for model in (models["llama3_1_8b"], models["llama3_1_8b"].with_weights("fp8"), models["deepseek_r1"]):
        assert precision_notes(model, devices["h100_sxm"]) == []


def test_fp8_on_an_a100_is_weight_only_and_says_so(models, devices):
    model, device = models["llama3_1_8b"].with_weights("fp8"), devices["a100_80gb_sxm"]
    (note,) = precision_notes(model, device)
    assert note == (
        f"weights=fp8: {device.name} does not compute in fp8; weights are stored in fp8 "
        "and multiplied in bf16."
    )


def test_fp8_on_an_a100_reads_half_of_the_bytes_and_multiplies_at_the_peak_of_bf16(
    models, devices, make_shape
):
    device, shape = devices["a100_80gb_sxm"], make_shape([1])
    plain, stored = models["llama3_1_8b"], models["llama3_1_8b"].with_weights("fp8")
    full, half = (Roofline(model=model, device=device) for model in (plain, stored))
    assert half.peak_flops_per_s == full.peak_flops_per_s == 312e12
    assert full.bytes_moved(shape) - half.bytes_moved(shape) == sum(
        matrix.elements for matrix in plain.quantised_matrices()
    )
    assert half.seconds(shape) < 0.75 * full.seconds(shape)
    on_hopper = Roofline(model=stored, device=devices["h100_sxm"])
    assert on_hopper.peak_flops_per_s == pytest.approx(2 * 989.4e12, rel=1e-3)


def test_experts_have_a_note_of_their_own(models, devices):
    model = models["mixtral_8x7b"].with_weights(None, "nvfp4")
    (note,) = precision_notes(model, devices["h100_sxm"])
    assert note.startswith(f"moe_weights=nvfp4: {devices['h100_sxm'].name} does not compute in fp4")
    assert precision_notes(model, devices["b200_sxm"]) == []


def test_a_chip_before_ampere_multiplies_in_fp16(models, devices):
    (note,) = precision_notes(models["qwen3_8b"].with_weights("fp8"), devices["t4"])
    assert note.endswith("multiplied in fp16.")


def test_weight_only_formats_need_no_units(models, devices):
    assert precision_notes(models["llama3_1_8b"].with_weights("int4_wo"), devices["t4"]) == []


def test_sparsity_saves_bytes_only_where_there_are_no_units_for_it(models, devices):
    sparse = replace(models["llama3_1_8b"], sparsity="2:4")
    assert precision_notes(sparse, devices["h100_sxm"]) == []
    (note,) = precision_notes(sparse, devices["t4"])
    assert (
        note == f"sparsity=2:4: {devices['t4'].name} has no sparse tensor cores; it saves bytes, not FLOPs."
    )
