"""The roofline: arrays equal numbers bit by bit, parts sum to the whole, prices move the right way."""

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hwmodels.assembly.roofline import Roofline
from hwmodels.assembly.site import Kernels
from hwmodels.devices.host import CudaGraphs, HostOverhead
from hwmodels.iterations.critical_path import bound_of
from hwmodels.iterations.iteration import COMPONENTS, IterationShape, causal_pairs
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.operators.calibration import Calibration
from hwmodels.operators.stream import StreamCurve

NO_HOST = HostOverhead(iteration_s=0, sequence_s=0, launch_s=0, graph_replay_s=0)
BOUNDS = {"compute", "memory", "communication", "launch"}

chunks = st.lists(st.tuples(st.integers(1, 800), st.integers(0, 8192)), max_size=3)
"""(new, cached) tokens of each prompt chunk."""
contexts = st.lists(st.integers(1, 8192), max_size=40) | st.lists(
    st.integers(1, 50), min_size=250, max_size=300
)
"""Context of each decode."""
drawn_shapes = st.tuples(contexts, chunks, st.booleans()).filter(lambda drawn: drawn[0] or drawn[1])
alike = st.tuples(
    st.sampled_from([0, 0, 1, 2, 3, 7, 8, 15, 40, 128, 300, 511]),
    st.integers(1, 200) | st.integers(1, 20_000),
    st.sampled_from([0, 0, 1, 2, 3, 8]),
    st.integers(1, 64) | st.integers(1, 800),
    st.just(0) | st.integers(0, 8192),
).filter(lambda counts: counts[0] + counts[2] > 0)
"""(decodes, context of each, chunks, new tokens of each, cached tokens of each)."""

few = settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
"""Examples for each of the kinds of models and layouts."""


# Numbers and arrays


@few
@given(drawn=st.lists(drawn_shapes, min_size=1, max_size=12))
def test_arrays_equal_numbers_to_the_last_bit(roofline, make_shape, drawn):
    shapes = [make_shape(*one) for one in drawn]
    arrays = IterationShape(
        *(np.array(column) for column in zip(*[shape.counts for shape in shapes], strict=True))
    )
    floats = IterationShape(*(column.astype(float) for column in arrays.counts))
    one_by_one = [roofline.seconds(shape) for shape in shapes]
    assert roofline.seconds(arrays).tolist() == one_by_one
    assert roofline.seconds(floats).tolist() == one_by_one


@few
@given(contexts=contexts.filter(len), k=st.integers(1, 300))
def test_a_leap_equals_its_steps_to_the_last_bit(roofline, make_shape, contexts, k):
    first = make_shape(contexts)
    at = first.decode_context_tokens + first.decode_seqs * np.arange(k)
    steps = [roofline.seconds(first._replace(decode_context_tokens=context)) for context in at.tolist()]
    ends_s = list(accumulate(steps, initial=0.7))[1:]
    assert roofline.decode_ends(0.7, first.decode_seqs, first.decode_context_tokens, k) == ends_s
    assert roofline.seconds(first._replace(decode_context_tokens=at)).tolist() == steps


@few
@given(contexts=contexts, chunk=st.tuples(st.integers(1, 2048), st.integers(0, 8192)), k=st.integers(2, 40))
def test_a_leap_of_chunks_equals_its_steps_to_the_last_bit(roofline, make_shape, contexts, chunk, k):
    """The same chunk again and again, further into its prompt each time, beside decodes that grow."""
    new, cached = chunk
    steps = [
        make_shape([context + i for context in contexts], [(new, cached + i * new)], completed=False)
        for i in range(k)
    ]
    at = np.arange(k)
    leap = steps[0]._replace(
        decode_context_tokens=steps[0].decode_context_tokens + len(contexts) * at,
        prefill_pairs=causal_pairs(new, cached + at * new),
        prefill_context_tokens=new + cached + at * new,
    )
    assert roofline.seconds(leap).tolist() == [roofline.seconds(step) for step in steps]


def test_launches_of_mixed_iterations_need_prompts_and_decodes(models, devices, make_shape):
    """TensorRT-LLM, DeepSeek-R1 in fp8 by block, 61 layers: 44 launches more each, 1 ms per launch."""
    made = {
        library: Roofline(
            model=models["deepseek_r1"],
            device=devices["h200_sxm"],
            layout=ParallelLayout(tensor_parallel_size=8),
            host=HostOverhead(launch_s=1e-3),
            kernels=Kernels(library=library),
        )
        for library in ("vllm", "trtllm")
    }
    for shape, more in (
        (make_shape(chunks=[(64, 0)]), 0),
        (make_shape([100]), 0),
        (make_shape([100], [(64, 0)]), 61 * 44),
    ):
        one = {name: roofline.breakdown(shape)["launch"] for name, roofline in made.items()}
        if shape.prefill_seqs:
            assert one["trtllm"] - one["vllm"] == pytest.approx(1e-3 * more, abs=20e-3)
        many = shape._replace(decode_context_tokens=np.full(3, shape.decode_context_tokens))
        assert made["trtllm"].seconds(many).tolist() == [made["trtllm"].seconds(shape)] * 3


def test_the_order_in_which_prices_are_asked_for_changes_nothing(kind, make_shape):
    shapes = [make_shape([100] * 9), make_shape(chunks=[(3000, 9)]), make_shape([7], [(5, 0)])]
    there, back = Roofline(**kind), Roofline(**kind)
    assert [there.seconds(shape) for shape in shapes] == [back.seconds(shape) for shape in shapes[::-1]][::-1]


# Parts and the whole


@few
@given(drawn=drawn_shapes)
def test_the_breakdown_sums_to_the_iteration(roofline, make_shape, drawn):
    shape = make_shape(*drawn)
    parts = roofline.breakdown(shape)
    assert tuple(parts) == COMPONENTS
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(roofline.seconds(shape), rel=1e-12)


def test_the_breakdown_of_many_iterations_has_their_shape(roofline, make_shape):
    leap = make_shape([100])._replace(decode_context_tokens=np.arange(100, 110))
    assert {part.shape for part in roofline.breakdown(leap).values()} == {(10,)}
    assert sum(roofline.breakdown(leap).values()) == pytest.approx(roofline.seconds(leap), rel=1e-12)


@few
@given(drawn=drawn_shapes)
def test_the_explanation_sums_to_the_iteration_and_names_bounds(roofline, make_shape, drawn):
    shape = make_shape(*drawn)
    lines = roofline.explain(shape)
    total_s = roofline.seconds(shape)
    assert sum(line.seconds for line in lines) == pytest.approx(total_s, rel=1e-12)
    assert sum(line.share for line in lines) == pytest.approx(1, rel=1e-12)
    assert [line.seconds for line in lines] == sorted((line.seconds for line in lines), reverse=True)
    for line in lines:
        assert line.bound in BOUNDS or (line.bound == line.component == "host")
        assert line.component in COMPONENTS
        assert line.share == pytest.approx(line.seconds / total_s)
    assert len({line.operator for line in lines}) == len(lines)


def test_the_explanation_agrees_with_the_breakdown(roofline, make_shape):
    shape = make_shape([1000] * 30, [(500, 20)])
    parts = roofline.breakdown(shape)
    by_component = dict.fromkeys(COMPONENTS, 0.0)
    for line in roofline.explain(shape):
        by_component[line.component] += line.seconds
    waits = by_component.pop("host")
    assert waits == pytest.approx(parts.pop("host") + parts.pop("launch"), abs=1e-12)
    for name, seconds in by_component.items():
        assert parts.get(name, 0.0) == pytest.approx(seconds, abs=1e-12)


def test_bounds_are_the_textbooks(models, devices, make_shape):
    """A long prompt is bound by compute, a decode by weights and KV, a norm over one token by its launch, an
    all-reduce by communication.
    """
    roofline = Roofline(
        model=models["llama3_1_70b"],
        device=devices["h100_sxm"],
        layout=ParallelLayout(tensor_parallel_size=2),
    )
    decode, prefill = (
        {line.operator: line.bound for line in roofline.explain(shape)}
        for shape in (make_shape([8000] * 16), make_shape(chunks=[(8192, 0)]))
    )
    assert (decode["gate_up_proj"], decode["attention_decode"]) == ("memory", "memory")
    assert (prefill["gate_up_proj"], prefill["attention_prefill"]) == ("compute", "compute")
    assert (decode["mlp_norm"], prefill["mlp_norm"]) == ("launch", "memory")
    assert decode["mlp_all_reduce"] == prefill["mlp_all_reduce"] == "communication"
    assert decode["host and launches"] == "host"


def test_only_short_kernels_are_bound_by_launches(models, devices, make_shape):
    """A long kernel far below the roof, at 1 % of the peak, is still bound by the roof."""
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"])
    gemm = next(op for op in roofline.operators if op.name == "gate_up_proj")
    flops_of_10us, bytes_of_1us = 989e12 * 10e-6, 3.35e12 * 1e-6
    assert bound_of(gemm, roofline.device, flops_of_10us, bytes_of_1us, 1e-3) == "compute"
    assert bound_of(gemm, roofline.device, flops_of_10us / 100, bytes_of_1us, 1e-3) == "memory"
    assert bound_of(gemm, roofline.device, flops_of_10us / 100, bytes_of_1us, 14e-6) == "launch"
    assert bound_of(gemm, roofline.device, flops_of_10us / 100, bytes_of_1us, 16e-6) == "memory"
    assert bound_of(gemm, roofline.device, flops_of_10us, bytes_of_1us, 14e-6) == "compute"
    eight = replace(gemm, kernels=8)
    assert bound_of(eight, roofline.device, flops_of_10us / 100, bytes_of_1us, 8 * 14e-6) == "launch"


# Pipelines


def pipeline(models, devices, stages):
    layout = ParallelLayout(pipeline_parallel_size=stages)
    return Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"], layout=layout, host=NO_HOST)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_one_sequence_takes_one_pass_of_all_stages(models, devices, make_shape, stages):
    """It takes as long as on one device that holds all layers, plus sends of a few microseconds each."""
    alone, cut = (pipeline(models, devices, count) for count in (1, stages))
    for shape in (make_shape([1000]), make_shape(chunks=[(200, 0)])):
        sends_s = cut.seconds(shape) - alone.seconds(shape)
        assert 0 < sends_s < (stages - 1) * 20e-6


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_prices_of_a_pipeline_rise_without_jumps(models, devices, make_shape, stages):
    """Prices rise with every decode, and with every token of a chunk, however it is cut.

    Sequence by sequence a pipeline fills, at most by one per micro-batch; then the micro-batches grow.
    """
    roofline = pipeline(models, devices, stages)
    decodes = [roofline.seconds(make_shape([1000] * count)) for count in range(1, 60)]
    chunks = [roofline.seconds(make_shape(chunks=[(n, 0)])) for n in range(1, 3000, 7)]
    for prices, most in ((decodes[stages - 1 :], 1.05), (chunks, 1.15)):
        ratios = [later / earlier for earlier, later in pairwise(prices)]
        assert min(ratios) >= 1
        assert max(ratios) < most
    filling = list(enumerate(pairwise(decodes[:stages]), start=1))
    assert all(1 <= later / earlier <= (count + 1) / count for count, (earlier, later) in filling)


# Against closed forms


def test_a_memory_bound_decode_is_bytes_over_the_bandwidth_reached(models, devices, make_shape):
    """Nothing can be faster than bytes over bandwidth, and kernels reach more than 70 % of it."""
    model, device = models["llama2_7b"], devices["a100_80gb_sxm"]
    roofline = Roofline(model=model, device=device, host=NO_HOST)
    shape = make_shape([2000])
    num_bytes = 2 * model.num_matmul_parameters + 2000 * 524_288
    assert roofline.bytes_moved(shape) == num_bytes
    assert 0.7 * roofline.seconds(shape) < num_bytes / 2.039e12 < roofline.seconds(shape)


def test_a_long_prefill_of_a_large_model_is_flops_over_the_peak_reached(models, devices, make_shape):
    roofline = Roofline(model=models["llama3_1_70b"], device=devices["b200_sxm"], host=NO_HOST)
    shape = make_shape(chunks=[(8192, 0)])
    ideal_s = roofline.flops(shape) / 2250e12
    assert 0.6 * roofline.seconds(shape) < ideal_s < roofline.seconds(shape)


@few
@given(drawn=drawn_shapes)
def test_no_iteration_beats_the_data_sheet(models, devices, make_shape, drawn):
    """One device, a dense model: every FLOP and every byte at full speed is a lower bound."""
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"], host=NO_HOST)
    shape = make_shape(*drawn)
    compute_s = roofline.flops(shape) / roofline.peak_flops_per_s
    memory_s = roofline.bytes_moved(shape) / roofline.peak_bytes_per_s
    assert roofline.seconds(shape) >= max(compute_s, memory_s)


def test_a_7b_model_at_100_tokens_a_second_uses_70_percent_of_2_tb_a_second(models, devices, make_shape):
    """The textbook's MBU, 14e9 bytes x 100 / 2e12; the model is 13.5e9, its embedding table is not read."""
    device = replace(devices["a100_80gb_sxm"], memory_bandwidth_bytes_per_s=2e12)
    roofline = Roofline(model=models["llama2_7b"], device=device)
    mbu = roofline.bytes_moved(make_shape([1])) * 100 / roofline.peak_bytes_per_s
    assert mbu == pytest.approx(0.70, abs=0.04)


def test_flops_are_2nd_plus_attention(models, devices, make_shape):
    model = models["llama3_1_8b"]
    roofline = Roofline(model=model, device=devices["h100_sxm"])
    shape = make_shape([100, 200], [(50, 10)])
    layers = 2 * (model.num_matmul_parameters - model.embedding_elements) * 52
    head = 2 * model.embedding_elements * 3
    attention = 4 * 32 * 32 * 128 * (300 + causal_pairs(50, 10))
    assert roofline.flops(shape) == layers + head + attention


def test_work_and_peaks_are_those_of_the_whole_replica(kind, roofline, make_shape):
    """However a model is cut: FLOPs and bytes stay, peaks are those of all devices."""
    shape = make_shape([100] * 30, [(50, 10)])
    alone = Roofline(**{**kind, "layout": ParallelLayout()})
    assert roofline.flops(shape) == alone.flops(shape)
    assert roofline.bytes_moved(shape) == alone.bytes_moved(shape)
    count = kind["layout"].num_devices
    assert roofline.peak_flops_per_s == pytest.approx(count * alone.peak_flops_per_s)
    assert roofline.peak_bytes_per_s == pytest.approx(count * kind["device"].memory_bandwidth_bytes_per_s)


def test_padding_is_not_counted_as_work(models, devices, make_shape):
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"])
    eager = Roofline(
        model=models["llama3_1_8b"], device=devices["h100_sxm"], cuda_graphs=CudaGraphs(enabled=False)
    )
    nine = make_shape([100] * 9)
    assert roofline.flops(nine) == eager.flops(nine)
    assert roofline.bytes_moved(nine) == eager.bytes_moved(nine)


# Which way prices move. A batch is known by its sums: one more sequence, shorter than the others, lowers the
# mean context, so what waits for the longest one is taken to end sooner. Batches here are alike.


def shape_of(make_shape, counts):
    decodes, context, chunks, new, cached = counts
    return make_shape([context] * decodes, [(new, cached)] * chunks)


@few
@given(counts=alike, more=st.tuples(*[st.integers(0, 4), st.integers(0, 500)] * 2, st.integers(0, 500)))
def test_a_larger_batch_of_longer_contexts_is_never_cheaper(roofline, make_shape, counts, more):
    """More sequences of the same kind, longer contexts, longer chunks, more cached tokens; all at once.

    A first chunk would end the replay of a graph, and with it the padding: both batches have chunks, or
    neither.
    """
    decodes, context, chunks, new, cached = (a + b for a, b in zip(counts, more, strict=True))
    larger = (decodes if counts[0] else 0, context, chunks if counts[2] else 0, new, cached)
    assert roofline.seconds(shape_of(make_shape, larger)) >= roofline.seconds(shape_of(make_shape, counts))


@few
@given(drawn=drawn_shapes, more=st.integers(1, 4096))
def test_longer_contexts_are_never_cheaper_whatever_the_batch(roofline, make_shape, drawn, more):
    shape = make_shape(*drawn)
    seconds = roofline.seconds(shape)
    if shape.decode_seqs:
        longer = shape._replace(decode_context_tokens=shape.decode_context_tokens + more)
        assert roofline.seconds(longer) >= seconds
    further = shape._replace(
        prefill_pairs=shape.prefill_pairs + more * shape.prefill_tokens,
        prefill_context_tokens=shape.prefill_context_tokens + more * shape.prefill_seqs,
    )
    assert roofline.seconds(further) >= seconds


figures = st.sampled_from(["memory", "peak", "bandwidth_bytes_per_s", "latency_s"])


@few
@given(counts=alike, figure=figures, factor=st.floats(1, 10))
@example(counts=(40, 165, 2, 710, 0), figure="bandwidth_bytes_per_s", factor=1.6)
def test_a_better_device_is_never_slower(kind, make_shape, counts, figure, factor):
    device, shape = kind["device"], shape_of(make_shape, counts)
    slow, fast = (
        Roofline(**{**kind, "device": d}, host=NO_HOST) for d in (device, better(device, figure, factor))
    )
    # In a pipeline the time between stages is added and taken off again: the last bit may go up.
    assert fast.seconds(shape) <= slow.seconds(shape) * (1 + 1e-12)


def better(device, figure, factor):
    """Returns the device with a larger memory bandwidth or peak, or with faster links."""
    if figure == "memory":
        return replace(device, memory_bandwidth_bytes_per_s=factor * device.memory_bandwidth_bytes_per_s)
    if figure == "peak":
        peaks = {dtype: factor * peak for dtype, peak in device.peak_flops_per_s.items()}
        return replace(device, peak_flops_per_s=peaks)
    links = {name: getattr(device, name) for name in ("pcie", "scale_up", "inter_node")}
    times = 1 / factor if figure == "latency_s" else factor
    faster = {
        name: replace(link, **{figure: times * getattr(link, figure)}) for name, link in links.items() if link
    }
    return replace(device, **faster)


def test_a_curve_that_reaches_less_is_slower(models, devices, make_shape):
    asked = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"], "host": NO_HOST}
    slow = Calibration(stream=StreamCurve(bandwidth_share=0.1))
    shape = make_shape(chunks=[(2048, 0)])
    assert Roofline(**asked, calibration=slow).seconds(shape) > Roofline(**asked).seconds(shape)


# CUDA graphs, launches, the host


def operator_seconds(roofline, shape):
    found = {}
    for op, seconds in roofline.operator_seconds(shape):
        found[op.name] = found.get(op.name, 0.0) + float(seconds)
    return found


def test_a_decode_is_padded_to_the_captured_size(models, devices, make_shape):
    """9 sequences run as 16: the same GEMMs, elementwise operators; attention and LM head see only 9."""
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"])
    nine, sixteen = (operator_seconds(roofline, make_shape([9000] * n)) for n in (9, 16))
    assert nine["gate_up_proj"] == sixteen["gate_up_proj"]
    assert nine["rotary"] == sixteen["rotary"]
    assert nine["attention_decode"] < sixteen["attention_decode"]
    assert nine["sampling"] < sixteen["sampling"]


def test_a_batch_beyond_the_graphs_or_with_a_chunk_is_not_padded(models, devices, make_shape):
    asked = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"], "host": NO_HOST}
    graphed = Roofline(**asked, cuda_graphs=CudaGraphs(max_capture_size=16))
    eager = Roofline(**asked, cuda_graphs=CudaGraphs(enabled=False))
    for shape in (make_shape([9] * 17), make_shape([9] * 9, [(5, 0)]), make_shape([9] * 16)):
        assert graphed.seconds(shape) == eager.seconds(shape)
    assert graphed.seconds(make_shape([9] * 9)) > eager.seconds(make_shape([9] * 9))


def test_each_device_pads_its_own_share(models, devices, make_shape):
    """Attention data parallel: 9 sequences on each of 4 devices run as 16; all 36 tokens meet the experts."""
    asked = {"model": models["qwen3_30b_a3b"], "device": devices["h100_sxm"]}
    layout = ParallelLayout(attention_data_parallel_size=4)
    spread = operator_seconds(Roofline(**asked, layout=layout), make_shape([100] * 36))
    alone = operator_seconds(Roofline(**asked), make_shape([100] * 16))
    assert spread["qkv_proj"] == alone["qkv_proj"]


def test_a_small_model_waits_for_its_launches_without_graphs(models, devices, make_shape):
    """SmolLM2-135M, 30 layers of 10: norm, QKV, rotary, KV write, attention, O, norm, up, activation, down;
    embedding, final norm, LM head, 4 of sampling: 307 launches of 20 us.
    """
    host = HostOverhead(iteration_s=700e-6, sequence_s=4e-6, launch_s=20e-6, graph_replay_s=10e-6)
    asked = {"model": models["smollm2_135m"], "device": devices["h100_sxm"], "host": host}
    shape = make_shape([100])
    eager, graphed = Roofline(**asked, cuda_graphs=CudaGraphs(enabled=False)), Roofline(**asked)
    assert eager.seconds(shape) == pytest.approx(307 * 20e-6 + 704e-6)
    assert eager.breakdown(shape)["launch"] > 0
    assert graphed.breakdown(shape)["launch"] == 0
    assert graphed.breakdown(shape)["host"] == pytest.approx(704e-6)
    assert graphed.seconds(shape) < eager.seconds(shape)


def test_an_overlapped_host_hides_behind_the_gpu(models, devices, make_shape):
    asked = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"]}
    shape = make_shape([1000] * 8)
    gpu_s = Roofline(**asked, host=NO_HOST).seconds(shape)
    fast = HostOverhead(iteration_s=1e-4, sequence_s=1e-6, graph_replay_s=1e-5, overlapped=True)
    slow = replace(fast, iteration_s=0.1)
    assert Roofline(**asked, host=fast).seconds(shape) == gpu_s
    assert Roofline(**asked, host=slow).seconds(shape) == pytest.approx(0.1 + 8e-6 + 1e-5)
    waiting = replace(fast, overlapped=False)
    assert Roofline(**asked, host=waiting).seconds(shape) == pytest.approx(gpu_s + 1e-4 + 8e-6)


def test_the_lm_head_costs_nothing_where_no_prompt_completes(roofline, make_shape):
    assert roofline.breakdown(make_shape(chunks=[(512, 0)], completed=False))["lm_head"] == 0
    assert roofline.breakdown(make_shape(chunks=[(512, 0)]))["lm_head"] > 0


def test_t4_prices_a_bf16_checkpoint_in_fp16(models, devices):
    roofline = Roofline(model=models["qwen3_8b"], device=devices["t4"])
    assert roofline.model.dtype == roofline.compute_dtype == "fp16"
    assert roofline.peak_flops_per_s == 65e12


def test_rejects_what_the_layout_rejects(models, devices):
    layout = ParallelLayout(tensor_parallel_size=16)
    with pytest.raises(ValueError, match="tensor_parallel_size=16: must be 1 to 8"):
        Roofline(model=models["llama3_1_70b"], device=devices["h100_sxm"], layout=layout)
