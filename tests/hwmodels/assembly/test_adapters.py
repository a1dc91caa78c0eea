"""Prices of batches that mix LoRA adapters: a closed form, zero without adapters, arrays equal numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.assembly.adapters import adapter_operators
from hwmodels.assembly.roofline import Roofline
from hwmodels.assembly.site import LORA_PEAK_SHARE, Kernels, Site
from hwmodels.devices.host import CudaGraphs, HostOverhead
from hwmodels.iterations.iteration import AdapterBatch, IterationShape, UnknownIterationError
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.iterations.memory import plan_memory
from hwmodels.levels.recorded import Recorded
from hwmodels.model.lora import Lora
from hwmodels.operators.calibration import Calibration

NOTHING = AdapterBatch(0, 0, 0)


@pytest.fixture(scope="module")
def roofline(models, devices):
    return Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"])


@pytest.fixture(scope="module")
def site(models, devices):
    return Site(
        model=models["llama3_1_8b"],
        device=devices["h100_sxm"],
        layout=ParallelLayout(),
        calibration=Calibration(),
        kernels=Kernels(),
    )


def decodes(num_seqs, context_tokens=1000, adapters=None):
    return IterationShape(num_seqs, num_seqs * context_tokens, 0, 0, 0, 0, num_seqs, adapters)


def test_a_batch_of_adapters_takes_what_its_ranks_and_tokens_move(site):
    """32 decodes, each with its own adapter of rank 16: 512 ranks, read once; memory sets the time."""
    adapters = AdapterBatch(tokens=32, rank_tokens=32 * 16, ranks=32 * 16)
    batch = ParallelLayout().rank_batch(decodes(32, adapters=adapters))
    bandwidth = site.device.memory_bandwidth_bytes_per_s * site.calibration.stream.bandwidth_share
    expected_s = 0.0
    for k, n in ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)):
        num_bytes = 2 * ((k + n) * 512 + (k + 2 * n) * 32 + 2 * 512)
        assert 2 * (k + n) * 512 / (989.4e12 * LORA_PEAK_SHARE) < num_bytes / bandwidth
        expected_s += 32 * (2 * site.calibration.stream.start_s + num_bytes / bandwidth)
    found_s = sum(op.calls * op.seconds(batch) for op in adapter_operators(site))
    assert found_s == pytest.approx(expected_s, rel=1e-12)


def test_long_prompts_of_one_adapter_are_bound_by_arithmetic(site):
    batch = ParallelLayout().rank_batch(decodes(1, adapters=AdapterBatch(16384, 64 * 16384, 64)))
    peak = site.device.peak_flops_per_s["bf16"] * LORA_PEAK_SHARE
    for op in adapter_operators(site):
        assert op.seconds(batch) >= op.flops(batch) / peak > 0


def test_the_same_adapters_in_every_batch_are_priced_alike_by_both_ways(models, devices):
    """`Lora` is the special case of one rank: what it adds to the GPU's time is the same."""
    model, device = models["llama3_1_8b"], devices["h100_sxm"]
    plain = Roofline(model=model, device=device, cuda_graphs=CudaGraphs(enabled=False))
    fixed = Roofline(
        model=model, device=device, cuda_graphs=CudaGraphs(enabled=False), lora=Lora(rank=16, num_active=8)
    )
    named = decodes(32, adapters=AdapterBatch(32, 32 * 16, 8 * 16))
    for component in ("gemm", "launch"):
        assert plain.breakdown(named)[component] == pytest.approx(
            fixed.breakdown(decodes(32))[component], rel=1e-9, abs=1e-12
        )
    assert plain.seconds(named) == pytest.approx(fixed.seconds(decodes(32)), rel=1e-9)


def test_an_iteration_grows_with_distinct_adapters_not_with_how_tokens_share_them(roofline):
    one = roofline.seconds(decodes(64, adapters=AdapterBatch(64, 64 * 16, 16)))
    many = roofline.seconds(decodes(64, adapters=AdapterBatch(64, 64 * 16, 64 * 16)))
    assert roofline.seconds(decodes(64)) < one < many


def test_no_adapter_in_a_batch_costs_nothing(roofline):
    for shape in (decodes(7), IterationShape(3, 900, 1, 200, 20100, 200, 4)):
        with_none = shape._replace(adapters=NOTHING)
        assert roofline.seconds(with_none) == pytest.approx(roofline.seconds(shape), rel=1e-12)
        assert roofline.flops(with_none) == roofline.flops(shape)
        assert roofline.bytes_moved(with_none) == roofline.bytes_moved(shape)


counts = st.tuples(
    st.integers(0, 300), st.integers(1, 2000), st.integers(0, 1500), st.integers(0, 40), st.integers(1, 64)
)


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tensor_parallel_size=2)])
@pytest.mark.parametrize("overlapped", [False, True])
@given(drawn=st.lists(counts, min_size=1, max_size=8))
def test_arrays_equal_numbers_to_the_last_bit(models, devices, layout, overlapped, drawn):
    model = Roofline(
        model=models["llama3_1_8b"],
        device=devices["h100_sxm"],
        layout=layout,
        host=HostOverhead(overlapped=overlapped),
    )
    shapes = []
    for num_seqs, context, new, num_adapters, rank in drawn:
        num_seqs = max(num_seqs, int(not new))
        tokens = num_seqs + new
        used = min(num_adapters, tokens)
        adapters = AdapterBatch(tokens if used else 0, rank * tokens if used else 0, rank * used)
        chunk = (1, new, new * (new + 1) // 2, new) if new else (0, 0, 0, 0)
        shapes.append(IterationShape(num_seqs, num_seqs * context, *chunk, num_seqs, adapters))
    columns = [np.array(column) for column in zip(*[shape.counts for shape in shapes], strict=True)]
    together = IterationShape(
        *columns, AdapterBatch(*map(np.array, zip(*[shape.adapters for shape in shapes], strict=True)))
    )
    assert model.seconds(together).tolist() == [model.seconds(shape) for shape in shapes]


def test_a_leap_of_decodes_with_adapters_is_priced_as_its_iterations(roofline):
    adapters = AdapterBatch(20, 20 * 32, 5 * 32)
    contexts = 4000 + 20 * np.arange(50)
    leap = roofline.seconds(IterationShape(20, contexts, 0, 0, 0, 0, 20, adapters))
    assert leap.tolist() == [
        roofline.seconds(IterationShape(20, int(context), 0, 0, 0, 0, 20, adapters)) for context in contexts
    ]


def test_components_and_operators_sum_to_the_iteration(roofline):
    shape = IterationShape(30, 30000, 2, 700, 120000, 900, 31, AdapterBatch(500, 8000, 160))
    seconds = roofline.seconds(shape)
    assert sum(roofline.breakdown(shape).values()) == pytest.approx(seconds, rel=1e-9)
    lines = {line.operator: line for line in roofline.explain(shape)}
    assert sum(line.seconds for line in lines.values()) == pytest.approx(seconds, rel=1e-9)
    assert lines["lora"].seconds > 0
    more = roofline.bytes_moved(shape) - roofline.bytes_moved(shape._replace(adapters=None))
    assert more == 2 * 160 * 32 * (4096 + 6144 + 4096 + 4096 + 4096 + 28672 + 14336 + 4096)


def test_a_level_that_has_seen_none_refuses_adapters(roofline):
    recorded = Recorded(shapes=decodes(np.array([4])), durations_s=np.array([1.0]), base=roofline)
    with pytest.raises(
        UnknownIterationError, match=r"recorded: does not model LoRA adapters; choose latency=cal"
    ):
        recorded.seconds(decodes(4, adapters=NOTHING))


def test_slots_are_set_aside_from_the_memory_of_kv(models, devices):
    """8 slots of rank 64: 8 x 64 x 32 layers x 69,632 numbers x 2 bytes = 2.13 GiB."""
    given = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"]}
    plain, slots = plan_memory(**given), plan_memory(**given, lora=Lora(rank=64, num_active=8))
    assert slots.adapter_bytes == 8 * 64 * 32 * 69632 * 2
    lost = (plain.num_blocks - slots.num_blocks) * 16 * plain.kv_bytes_per_token
    assert lost == pytest.approx(slots.adapter_bytes, abs=16 * plain.kv_bytes_per_token)
