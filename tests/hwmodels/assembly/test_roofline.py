"""The roofline: arrays equal numbers bit by bit, and parts sum to the whole."""

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.assembly.roofline import Roofline
from hwmodels.assembly.site import Kernels
from hwmodels.host import HostOverhead
from hwmodels.iterations import COMPONENTS, IterationShape, causal_pairs
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.iterations.ops import bound_of
from tests.hwmodels.assembly.drawn_iterations import NO_HOST, contexts, drawn_shapes, few

BOUNDS = {"compute", "memory", "communication", "launch"}


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


@pytest.mark.parametrize("model", ["deepseek_v2_lite", "llama3_1_8b"])
def test_parts_of_a_pipeline_sum_to_the_whole_with_and_without_decodes(models, devices, make_shape, model):
    """A prompt without decodes leaves no micro-batch that only decodes; experts have no time for no token."""
    layout = ParallelLayout(pipeline_parallel_size=2)
    roofline = Roofline(model=models[model], device=devices["h100_sxm"], layout=layout, host=NO_HOST)
    shapes = [make_shape(chunks=[(9, 0)]), make_shape([60] * 20, [(9, 0)]), make_shape([60] * 20)]
    arrays = IterationShape(
        *(np.array(column) for column in zip(*[shape.counts for shape in shapes], strict=True))
    )
    of_arrays = roofline.breakdown(arrays)
    for i, shape in enumerate(shapes):
        parts = roofline.breakdown(shape)
        assert sum(parts.values()) == pytest.approx(roofline.seconds(shape))
        assert {name: part[i] for name, part in of_arrays.items()} == pytest.approx(parts)
        assert sum(line.seconds for line in roofline.explain(shape)) == pytest.approx(roofline.seconds(shape))
