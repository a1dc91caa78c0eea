"""CUDA-graph padding, and host settings that are refused."""

import math

import numpy as np
import pytest

from hwmodels.assembly.roofline import Roofline
from hwmodels.host import Compilation, CudaGraphs, HostOverhead, HostShare
from hwmodels.iterations.ops import decode_shape, prefill_shape


def test_capture_sizes_are_vllms_ladder():
    sizes = CudaGraphs(max_capture_size=512).sizes
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert sizes[sizes.index(256) - 1 : sizes.index(256) + 2] == [248, 256, 272]
    assert (sizes[-1], len(sizes)) == (512, 51)


def test_a_batch_is_padded_to_the_next_captured_size():
    padded = CudaGraphs(max_capture_size=16).padded()
    assert padded == [0, 1, 2, 4, 4, 8, 8, 8, 8, 16, 16, 16, 16, 16, 16, 16, 16]


def test_without_graphs_nothing_is_captured():
    graphs = CudaGraphs(enabled=False)
    assert graphs.sizes == []
    assert graphs.padded() == [0]


def test_rejects_a_capture_size_below_one():
    with pytest.raises(ValueError, match="max_capture_size=0: must be >= 1; enabled=false for no graphs"):
        CudaGraphs(max_capture_size=0)


@pytest.mark.parametrize("name", ["iteration_s", "sequence_s", "launch_s", "graph_replay_s", "op_s"])
@pytest.mark.parametrize("value", [-1e-6, math.nan, math.inf])
def test_rejects_seconds_that_are_negative_or_not_finite(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}: must be a finite number >= 0 s"):
        HostOverhead(**{name: value})


# Launches without graphs


def test_a_kernel_of_an_eager_module_is_three_operators():
    """100 kernels: compiled 0.4 ms, eager 100 x 3 x 18 us = 5.4 ms, which 3 ms of kernels do not hide."""
    host = HostOverhead(iteration_s=0, sequence_s=0)
    for compilation, expected_s in (("inductor", 3e-3), ("native", 3e-3), ("eager", 5.4e-3)):
        share = HostShare(host.under(Compilation[compilation]), CudaGraphs(enabled=False), 100)
        assert share.wall_seconds(3e-3, False, 1) == pytest.approx(expected_s)
        assert share.wall_seconds(8e-3, False, 1) == pytest.approx(8e-3)  # launches run ahead


def test_the_device_waits_between_piecewise_graphs():
    """32 layers: it waits 32 times for a kernel of 4 us and a graph of 10 us."""
    host = HostOverhead(iteration_s=0, sequence_s=0)
    share = HostShare(host, CudaGraphs(mode="piecewise"), 300, attentions=32)
    assert share.wall_seconds(8e-3, True, 1) == pytest.approx(8e-3 + 32 * 14e-6)
    assert share.wall_seconds(8e-3, False, 1) == pytest.approx(8e-3)  # launches run ahead
    both = share.wall_seconds(np.array([8e-3, 8e-3]), np.array([True, False]), 1)
    assert both == pytest.approx([8e-3 + 32 * 14e-6, 8e-3])
    assert sum(share.parts(8e-3, True, 1)) == pytest.approx(32 * 14e-6)
    full = HostShare(host, CudaGraphs(), 300, attentions=32)
    assert full.wall_seconds(8e-3, True, 1) == pytest.approx(8e-3)


def test_piecewise_graphs_cost_what_was_measured(models, devices):
    """vLLM's pull request 20059, Qwen2.5-1.5B, a request per second: TPOT 5.42 and 5.02 ms."""
    steps = {}
    for mode in ("full", "piecewise"):
        roofline = Roofline(
            model=models["qwen2_5_1_5b"], device=devices["h100_sxm"], cuda_graphs=CudaGraphs(mode=mode)
        )
        steps[mode] = roofline.seconds(decode_shape(1, 1000))
    assert steps["piecewise"] - steps["full"] == pytest.approx(0.40e-3, rel=0.1)


def test_rejects_piecewise_graphs_without_the_launches_of_operators():
    with pytest.raises(ValueError, match="mode=piecewise: needs the launches of single"):
        HostShare(HostOverhead(), CudaGraphs(mode="piecewise"), 300)
    with pytest.raises(ValueError, match="mode=x: must be one of full, piecewise"):
        CudaGraphs(mode="x")


def test_a_launch_that_costs_more_than_three_operators_keeps_its_time():
    assert HostOverhead(launch_s=60e-6).under(Compilation.eager).launch_s == 60e-6


def test_a_layer_of_plain_pytorch_launches_what_was_counted_in_gpt_fast(models, devices):
    """61 per layer of Llama-2, and 14 besides: 18 us each."""
    host = HostOverhead(iteration_s=0, sequence_s=0).under(Compilation.pytorch)
    model = Roofline(
        model=models["llama2_7b"],
        device=devices["a100_80gb_sxm"],
        host=host,
        cuda_graphs=CudaGraphs(enabled=False),
    )
    launches = sum(op.calls * host.launches(op.name, op.kernels) for op in model.operators)
    assert launches == 32 * 61 + 14
    assert model.seconds(decode_shape(1, 100)) == pytest.approx(1966 * 18e-6)


def test_graphs_hide_what_launches_cost(models, devices):
    """A decode replays a graph however the model is compiled; a prompt does not."""
    times = {}
    for compilation in ("inductor", "eager", "pytorch"):
        model = Roofline(
            model=models["llama3_1_8b"],
            device=devices["h100_sxm"],
            host=HostOverhead().under(Compilation[compilation]),
        )
        times[compilation] = model.seconds(decode_shape(8, 500)), model.seconds(prefill_shape(1, 100))
    decodes, prompts = zip(*times.values(), strict=True)
    assert decodes[0] == decodes[1] == decodes[2]
    assert prompts[0] < prompts[1] < prompts[2]
