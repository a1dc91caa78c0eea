"""Systolic arrays: products padded to the array, weights streamed; attention and experts on them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.assembly.roofline import Roofline
from hwmodels.assembly.site import Kernels
from hwmodels.device import SystolicArray
from hwmodels.model.weights import weight_format
from hwmodels.operators.attention import AttentionCurve, HeadLayout
from hwmodels.operators.gemm import GemmCurve
from hwmodels.operators.moe import MoeCurve
from hwmodels.operators.moe_routing import ExpertLayer, Routing
from hwmodels.operators.systolic import (
    SystolicDecode,
    SystolicPrefill,
    padded_flops,
    systolic_gemm_seconds,
    systolic_moe_seconds,
)

WEIGHTS = SystolicArray(rows=128, columns=128)
OUTPUTS = SystolicArray(rows=128, columns=1024, outputs_stay=True)
BF16 = weight_format("bf16")
IDEAL = GemmCurve(start_s=1e-12, bandwidth_share=1.0, flops_share=1.0)
sizes = st.integers(1, 5000)


def test_small_products_are_padded_to_the_array():
    assert padded_flops(1, 200, 100, WEIGHTS) == 2 * 128 * 256 * 128
    assert padded_flops(1, 200, 100, OUTPUTS) == 2 * 128 * 1024 * 100


def test_whole_tiles_have_no_padding():
    for array in (WEIGHTS, OUTPUTS):
        assert padded_flops(256, 2048, 384, array) == 2 * 256 * 2048 * 384


@given(sizes, sizes, sizes)
def test_padding_only_adds_and_less_than_a_tile(m, n, k):
    for array in (WEIGHTS, OUTPUTS):
        flops = padded_flops(m, n, k, array)
        assert 2 * m * n * k <= flops
        assert flops < 2 * (m + array.rows) * (n + array.columns) * (k + array.rows)


def test_worked_number_of_the_module(devices):
    seconds = systolic_gemm_seconds(16, 7168, 4096, BF16, devices["tpu_v5e"], GemmCurve())
    assert seconds == pytest.approx(90.6e-6, rel=1e-3)


def test_large_products_reach_the_peak_and_small_ones_the_bandwidth(devices):
    device = devices["tpu_v6e"]
    large = systolic_gemm_seconds(8192, 8192, 8192, BF16, device, IDEAL)
    assert large == pytest.approx(2 * 8192**3 / 918e12)
    small = systolic_gemm_seconds(1, 8192, 8192, BF16, device, IDEAL)
    assert small == pytest.approx(0.4e-6 + (8192 * 8192 * 2 + 8192 * 2) / 1638e9)


def test_up_to_the_rows_of_the_array_a_batch_costs_no_more_arithmetic(devices):
    """On a device whose memory is never the limit, 1 and 256 rows take as long, 512 twice as long."""
    device = replace(devices["tpu_v6e"], memory_bandwidth_bytes_per_s=1e20)
    one, full, twice = systolic_gemm_seconds(np.array([1, 256, 512]), 4096, 4096, BF16, device, IDEAL)
    assert one == full
    assert twice == pytest.approx(2 * full, rel=1e-6)


def test_no_rows_take_no_time(devices):
    assert systolic_gemm_seconds(0, 64, 64, BF16, devices["gaudi3"], GemmCurve()) == 0


def test_rejects_a_device_without_arrays(devices):
    with pytest.raises(ValueError, match="H100 SXM has no systolic arrays"):
        systolic_gemm_seconds(1, 64, 64, BF16, devices["h100_sxm"], GemmCurve())


@pytest.mark.parametrize("field", ["rows", "columns"])
def test_rejects_an_array_without_cells(field):
    with pytest.raises(ValueError, match=field):
        SystolicArray(**{"rows": 128, "columns": 128, field: 0})


def test_decode_attention_reads_keys_and_values_at_the_bandwidth(devices):
    """8 KV heads of 128 on a TPU v5e: 4,096 bytes a token, which take longer than 524,288 padded FLOPs."""
    heads = HeadLayout(num_heads=32, num_kv_heads=8, head_dim=128)
    curve = AttentionCurve(decode_start_s=5e-6, kv_bandwidth_share=1.0, flops_share=1.0)
    decode = SystolicDecode(heads, devices["tpu_v5e"], curve, "bf16")
    assert decode.seconds(4, 10_000) == pytest.approx(5e-6 + 10_000 * 4096 / 819e9)
    assert decode.seconds(0, 0) == 0


def test_many_query_rows_are_bound_by_the_array(devices):
    """200 rows of 4 heads are 800 rows over each key: 8 x 256 x 800 x 2 FLOPs a token."""
    heads = HeadLayout(num_heads=32, num_kv_heads=8, head_dim=128)
    curve = AttentionCurve(kv_bandwidth_share=1.0, flops_share=1.0)
    decode = SystolicDecode(heads, devices["tpu_v5e"], curve, "bf16", rows=200)
    assert decode.lines(1)[0][1] == pytest.approx(2 * 8 * 256 * 800 / 197e12)


def test_narrow_heads_are_padded_in_prefill(devices):
    """Heads of 64 take as long per pair as heads of 128 on arrays of 128, and half of that on none."""
    curve = AttentionCurve(prefill_start_s=1e-12, flops_share=1.0)
    per_pair = [
        SystolicPrefill(
            HeadLayout(num_heads=8, num_kv_heads=8, head_dim=width), devices["tpu_v5e"], curve, "bf16"
        ).pair_s
        for width in (64, 128)
    ]
    assert per_pair[0] == per_pair[1] == pytest.approx(4 * 8 * 128 / 197e12)


def test_experts_read_their_weights_once(devices):
    """Mixtral, one token: 2 experts of 176e6 weights in bf16."""
    layer = ExpertLayer(hidden_size=4096, intermediate_size=14336, top_k=2, num_experts=8)
    curve = MoeCurve(kernel_s=1e-12, weight_bandwidth_share=1.0, flops_share=1.0)
    seconds = systolic_moe_seconds(
        1, layer, BF16, devices["tpu_v5p"], curve, dtype="bf16", routing=Routing(kind="balanced")
    )
    assert seconds == pytest.approx(2 * 3 * 4096 * 14336 * 2 / 2765e9, rel=1e-6)


def test_iterations_of_a_whole_model_are_priced(models, devices, make_shape):
    """Llama-3.1-8B decodes on a TPU v6e no faster than its weights are read, and within twice that."""
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["tpu_v6e"])
    shape = make_shape(contexts=[512] * 8)
    least_s = roofline.bytes_moved(shape) / 1638e9
    assert least_s < roofline.seconds(shape) < 2.5 * least_s


def test_rejects_latent_attention(models, devices):
    with pytest.raises(ValueError, match=r"latent attention .* has no price on systolic arrays"):
        Roofline(model=models["deepseek_v2_lite"], device=devices["tpu_v5p"])


def test_rejects_attention_kernels_of_gpus(models, devices):
    kernels = Kernels(attention_kernels="flash_decoding")
    with pytest.raises(ValueError, match="attention_kernels=flash_decoding: has no price on the systolic"):
        Roofline(model=models["llama3_1_8b"], device=devices["tpu_v6e"], kernels=kernels)
