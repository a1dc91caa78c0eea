"""Prices of batches that mix LoRA adapters: a closed form, zero without adapters, arrays equal numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.assembly.roofline import Roofline
from hwmodels.assembly.site import Kernels, Site, adapter_operators
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations import AdapterBatch, IterationShape, UnknownIterationError
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.iterations.memory import plan_memory
from hwmodels.levels.recorded import Recorded
from hwmodels.model.weights import Lora
from hwmodels.operators import Calibration
from hwmodels.operators.lora_kernels import (
    PEAK_SHARE,
    LoraKernels,
    LoraWork,
    Projection,
    projection_seconds,
)

NOTHING = AdapterBatch(0, 0, 0, 0)
ONE = AdapterBatch(1, 1, 16, 16)


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


def test_an_operator_counts_what_its_adapters_move_and_takes_the_time_of_its_kernels(site):
    """32 decodes, each with its own adapter of rank 16: q, k and v have three adapters in one matrix."""
    adapters = AdapterBatch(adapters=32, tokens=32, rank_tokens=32 * 16, ranks=32 * 16)
    batch = ParallelLayout().rank_batch(decodes(32, adapters=adapters))
    work = LoraWork(batch_tokens=32, prefill_tokens=0, seqs=32, tokens=32, adapters=32, rank=16)
    given = site.kernels.lora, site.device, site.calibration.stream, 2
    projections = [
        Projection(4096, (4096, 1024, 1024)),
        Projection(4096, (4096,)),
        Projection(4096, (14336, 14336)),
        Projection(14336, (4096,)),
    ]
    for op, projection in zip(adapter_operators(site), projections, strict=True):
        sides = len(projection.slices) * projection.k + projection.n
        assert op.calls == 32
        assert op.flops(batch) == 2 * sides * 512
        assert op.stored_bytes(batch) == 2 * sides * 512
        activations = (projection.k + 2 * projection.n) * 32
        assert op.bytes_moved(batch) == 2 * (sides * 512 + activations + 2 * len(projection.slices) * 512)
        assert op.kernels == 3, "one shrink, one expand, and a fill of the buffer between them"
        assert op.seconds(batch) == projection_seconds(work, projection, *given)


def test_long_prompts_of_one_adapter_are_bound_by_arithmetic_at_least(site):
    batch = ParallelLayout().rank_batch(decodes(1, adapters=AdapterBatch(1, 16384, 64 * 16384, 64)))
    peak = site.device.peak_flops_per_s["bf16"] * PEAK_SHARE
    for op in adapter_operators(site):
        assert op.seconds(batch) >= op.flops(batch) / peak > 0


def test_routers_and_experts_have_no_adapters(models, devices):
    model = models["qwen3_30b_a3b"]
    kernels = Roofline(model=model, device=devices["h100_sxm"])._adapters.operators
    assert sum(op.calls for op in kernels) == 2 * model.num_layers, "on q, k, v and on o"


def test_every_kernel_of_a_layer_is_launched_by_the_host_outside_of_graphs(models, devices):
    """vllm: 4 shrinks and 4 expands in each of 32 layers, 70 us each; vllm_v0 has 7 and 7, 75 us each."""
    given = {"model": models["llama2_7b"], "device": devices["a100_80gb_sxm"]}
    for backend, per_layer, launch_s in (("vllm", 8, 70e-6), ("vllm_v0", 14, 75e-6)):
        kernels = Kernels(lora=LoraKernels(backend=backend))
        for own_s in (4e-6, 40e-6):
            host = HostOverhead(launch_s=own_s)
            eager = Roofline(**given, kernels=kernels, host=host, cuda_graphs=CudaGraphs(enabled=False))
            launches = eager._adapters.seconds(ParallelLayout().rank_batch(decodes(1, adapters=ONE)))[1]
            assert launches * own_s == pytest.approx(32 * per_layer * launch_s, rel=1e-12)
            added_s = eager.seconds(decodes(1, adapters=ONE)) - eager.seconds(decodes(1))
            assert added_s > 0
    assert Roofline(**given).seconds(decodes(1, adapters=ONE)) < eager.seconds(decodes(1, adapters=ONE)) / 2


def test_kernels_that_no_graph_captures_take_the_graph_from_batches_with_adapters(models, devices):
    given = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"]}
    seconds = {}
    for captured in (True, False):
        lora = LoraKernels(backend="vllm", captured=captured)
        model = Roofline(**given, kernels=Kernels(lora=lora), host=HostOverhead(launch_s=20e-6))
        seconds[captured] = model.seconds(decodes(8, adapters=ONE))
        assert model.seconds(decodes(8)) == Roofline(**given, host=HostOverhead(launch_s=20e-6)).seconds(
            decodes(8)
        )
    assert seconds[False] > max(seconds[True], 32 * 8 * 70e-6)


def test_before_graphs_without_adapters_idle_kernels_cost_their_starts(models, devices):
    """Llama-2-7B on an H100, 8 decodes: 12 kernels a layer take 10.5 % of a step (vLLM PR 25914)."""
    given = {"model": models["llama2_7b"], "device": devices["h100_sxm"]}
    plain = Roofline(**given, host=HostOverhead(iteration_s=0, sequence_s=0))
    lora = LoraKernels(max_loras=1, cudagraph_specialize_lora=False)
    idle = Roofline(**given, host=HostOverhead(iteration_s=0, sequence_s=0), kernels=Kernels(lora=lora))
    shape = decodes(8, 100)
    assert idle.seconds(shape) / plain.seconds(shape) - 1 == pytest.approx(0.105, abs=0.02)
    assert (
        idle.decode_ends(0.0, 8, 800, 3)
        == np.cumsum([idle.seconds(decodes(8, 100 + step)) for step in range(3)]).tolist()
    )
    assert sum(idle.breakdown(shape).values()) == pytest.approx(idle.seconds(shape), rel=1e-9)


def test_fully_sharded_adapters_divide_the_repeated_half_and_exchange_the_middle(models, devices):
    """TP 4, rank 64: each rank reads a quarter of what it repeated before; 8 collectives a layer pair up."""
    given = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"]}
    layout = ParallelLayout(tensor_parallel_size=4)
    batch = layout.rank_batch(decodes(1, adapters=AdapterBatch(1, 1, 64, 64)))
    read = {}
    for sharded in (False, True):
        kernels = Kernels(lora=LoraKernels(fully_sharded_loras=sharded))
        operators = Roofline(**given, layout=layout, kernels=kernels)._adapters.operators
        read[sharded] = sum(op.calls * op.stored_bytes(batch) for op in operators if not op.is_message)
        assert [op.name for op in operators if op.is_message] == (
            ["lora_all_gather", "lora_all_reduce"] * 2 if sharded else []
        )
    columns, rows = 3 * 4096 + 2 * 4096, 4096 + 14336  # inputs of q, k, v, gate, up; of o and down
    assert read[False] == 2 * 64 * 32 * (columns + (6144 + 28672) / 4 + rows / 4 + 2 * 4096)
    assert read[True] == 2 * 64 * 32 * (columns + 6144 + 28672 + rows + 2 * 4096) / 4


def test_the_same_adapters_in_every_batch_are_priced_alike_by_both_ways(models, devices):
    """`Lora` is the special case of one rank: what it adds to the GPU's time is the same."""
    model, device = models["llama3_1_8b"], devices["h100_sxm"]
    plain = Roofline(model=model, device=device, cuda_graphs=CudaGraphs(enabled=False))
    fixed = Roofline(
        model=model, device=device, cuda_graphs=CudaGraphs(enabled=False), lora=Lora(rank=16, num_active=8)
    )
    named = decodes(32, adapters=AdapterBatch(8, 32, 32 * 16, 8 * 16))
    for component in ("gemm", "launch"):
        assert plain.breakdown(named)[component] == pytest.approx(
            fixed.breakdown(decodes(32))[component], rel=1e-9, abs=1e-12
        )
    assert plain.seconds(named) == pytest.approx(fixed.seconds(decodes(32)), rel=1e-9)


def test_an_iteration_grows_with_distinct_adapters_not_with_how_tokens_share_them(roofline):
    one = roofline.seconds(decodes(64, adapters=AdapterBatch(1, 64, 64 * 16, 16)))
    many = roofline.seconds(decodes(64, adapters=AdapterBatch(64, 64, 64 * 16, 64 * 16)))
    assert roofline.seconds(decodes(64)) < one < many


def test_no_adapter_in_a_batch_costs_nothing(roofline):
    for shape in (decodes(7), decodes(1), IterationShape(3, 900, 1, 200, 20100, 200, 4)):
        with_none = shape._replace(adapters=NOTHING)
        assert roofline.seconds(with_none) == roofline.seconds(shape), "to the last bit"
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
        adapters = AdapterBatch(used, tokens if used else 0, rank * tokens if used else 0, rank * used)
        chunk = (1, new, new * (new + 1) // 2, new) if new else (0, 0, 0, 0)
        shapes.append(IterationShape(num_seqs, num_seqs * context, *chunk, num_seqs, adapters))
    columns = [np.array(column) for column in zip(*[shape.counts for shape in shapes], strict=True)]
    together = IterationShape(
        *columns, AdapterBatch(*map(np.array, zip(*[shape.adapters for shape in shapes], strict=True)))
    )
    assert model.seconds(together).tolist() == [model.seconds(shape) for shape in shapes]


def test_a_leap_of_decodes_with_adapters_is_priced_as_its_iterations(roofline):
    adapters = AdapterBatch(5, 20, 20 * 32, 5 * 32)
    contexts = 4000 + 20 * np.arange(50)
    leap = roofline.seconds(IterationShape(20, contexts, 0, 0, 0, 0, 20, adapters))
    assert leap.tolist() == [
        roofline.seconds(IterationShape(20, int(context), 0, 0, 0, 0, 20, adapters)) for context in contexts
    ]


def test_components_and_operators_sum_to_the_iteration(roofline):
    shape = IterationShape(30, 30000, 2, 700, 120000, 900, 31, AdapterBatch(10, 500, 8000, 160))
    seconds = roofline.seconds(shape)
    assert sum(roofline.breakdown(shape).values()) == pytest.approx(seconds, rel=1e-9)
    lines = {line.operator: line for line in roofline.explain(shape)}
    assert sum(line.seconds for line in lines.values()) == pytest.approx(seconds, rel=1e-9)
    assert lines["lora"].seconds > 0
    more = roofline.bytes_moved(shape) - roofline.bytes_moved(shape._replace(adapters=None))
    assert more == 2 * 160 * 32 * (3 * 4096 + 6144 + 4096 + 4096 + 2 * 4096 + 28672 + 14336 + 4096)


def test_a_level_that_has_seen_none_refuses_adapters(roofline):
    recorded = Recorded(shapes=decodes(np.array([4])), durations_s=np.array([1.0]), base=roofline)
    with pytest.raises(
        UnknownIterationError, match=r"recorded: does not model LoRA adapters; choose latency=cal"
    ):
        recorded.seconds(decodes(4, adapters=NOTHING))


def test_slots_are_set_aside_from_the_memory_of_kv(models, devices):
    """8 slots of rank 64: 8 x 64 x 32 layers x 81,920 numbers x 2 bytes = 2.5 GiB; q, k, v have an A each."""
    given = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"]}
    plain, slots = plan_memory(**given), plan_memory(**given, lora=Lora(rank=64, num_active=8))
    assert slots.adapter_bytes == 8 * 64 * 32 * 81920 * 2
    lost = (plain.num_blocks - slots.num_blocks) * 16 * plain.kv_bytes_per_token
    assert lost == pytest.approx(slots.adapter_bytes, abs=16 * plain.kv_bytes_per_token)
