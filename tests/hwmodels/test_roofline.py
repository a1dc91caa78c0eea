"""The roofline: its two evaluations agree, arrays equal numbers bit by bit, prices move the right way."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hwmodels.device import Efficiency
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iteration import COMPONENTS, IterationShape, causal_pairs
from hwmodels.roofline import NUM_TABULATED_TOKENS, Roofline

NO_HOST = HostOverhead(iteration_s=0, sequence_s=0, launch_s=0, graph_replay_s=0)
IDEAL = Efficiency(
    gemm_flops_share=1,
    attention_flops_share=1,
    stream_bandwidth_share=1,
    kv_bandwidth_share=1,
    scale_up_bandwidth_share=1,
    pcie_bandwidth_share=1,
    kernel_s=0,
    attention_kernel_s=0,
)

chunks = st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 8192)), max_size=4)
"""(new, cached) tokens of each prompt chunk."""
contexts = st.lists(st.integers(1, 8192), max_size=40)
"""Context of each decode."""


def make_shape(contexts=(), chunks=(), completed=True):
    new = [n for n, _ in chunks]
    return IterationShape(
        decode_seqs=len(contexts),
        decode_context_tokens=sum(contexts),
        prefill_seqs=len(chunks),
        prefill_tokens=sum(new),
        prefill_pairs=sum(causal_pairs(n, c) for n, c in chunks),
        prefill_context_tokens=sum(n + c for n, c in chunks),
        sampled_seqs=len(contexts) + (len(chunks) if completed else 0),
    )


shapes = st.builds(make_shape, contexts, chunks, st.booleans()).filter(
    lambda shape: shape.decode_seqs + shape.prefill_tokens > 0
)


@pytest.fixture(scope="session")
def rooflines(models, devices):
    """A single rank, eight ranks, no graphs with an overlapped host, and one that waits for its launches."""
    llama, h100 = models["llama3_1_8b"], devices["h100_sxm"]
    eager = CudaGraphs(enabled=False)
    return [
        Roofline(model=llama, device=h100),
        Roofline(model=models["llama3_1_70b"], device=h100, tensor_parallel_size=8),
        Roofline(model=models["qwen3_8b"], device=devices["l40s"], tensor_parallel_size=2, cuda_graphs=eager),
        Roofline(model=models["smollm2_135m"], device=h100, host=HostOverhead(overlapped=True)),
        Roofline(model=models["smollm2_135m"], device=devices["t4"], cuda_graphs=eager),
    ]


def test_one_decode_on_an_h100_takes_what_the_docstring_says(models, devices):
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"], host=NO_HOST)
    assert roofline.seconds(make_shape(contexts=[1024])) == pytest.approx(6.65e-3, abs=0.005e-3)


def test_an_ideal_memory_bound_decode_is_bytes_over_bandwidth(models, devices):
    """What is left are the activations: less than a thousandth."""
    model, device = models["llama2_7b"], devices["a100_80gb_sxm"]
    roofline = Roofline(model=model, device=device, efficiency=IDEAL, host=NO_HOST)
    shape = make_shape(contexts=[2000])
    num_bytes = 2 * model.num_matmul_parameters + 2000 * 524_288
    assert roofline.bytes_moved(shape) == num_bytes
    assert roofline.seconds(shape) == pytest.approx(num_bytes / 2.039e12, rel=1e-3)


def test_an_ideal_prefill_of_a_large_model_is_flops_over_peak(models, devices):
    """Elementwise operators, 5 % here, come on top."""
    roofline = Roofline(
        model=models["llama3_1_70b"], device=devices["h100_sxm"], efficiency=IDEAL, host=NO_HOST
    )
    shape = make_shape(chunks=[(8192, 0)])
    compute_s = roofline.seconds(shape) - roofline.breakdown(shape)["elementwise"]
    assert compute_s == pytest.approx(roofline.flops(shape) / 989.4e12, rel=1e-3)


def test_a_7b_model_at_100_tokens_a_second_uses_70_percent_of_2_tb_a_second(models, devices):
    """The textbook's MBU, 14e9 bytes x 100 / 2e12; the model is 13.5e9, its embedding table is not read."""
    device = replace(devices["a100_80gb_sxm"], memory_bandwidth_bytes_per_s=2e12)
    roofline = Roofline(model=models["llama2_7b"], device=device)
    mbu = roofline.bytes_moved(make_shape(contexts=[1])) * 100 / roofline.peak_bytes_per_s
    assert mbu == pytest.approx(0.70, abs=0.04)


def test_flops_are_2nd_plus_attention(models, rooflines):
    model = models["llama3_1_8b"]
    shape = make_shape(contexts=[100, 200], chunks=[(50, 10)])
    dense = (
        2 * (model.num_matmul_parameters - model.embedding_elements) * 52 + 2 * model.embedding_elements * 3
    )
    attention = 4 * 32 * 32 * 128 * (300 + causal_pairs(50, 10))
    assert rooflines[0].flops(shape) == dense + attention


def test_peaks_are_those_of_all_ranks(rooflines):
    assert rooflines[1].peak_flops_per_s == pytest.approx(8 * 989.4e12)
    assert rooflines[1].peak_bytes_per_s == pytest.approx(8 * 3.35e12)


@given(st.lists(shapes, min_size=1, max_size=20))
def test_arrays_equal_numbers_to_the_last_bit(rooflines, drawn):
    arrays = IterationShape(*(np.array(column) for column in zip(*drawn, strict=True)))
    floats = IterationShape(*(column.astype(float) for column in arrays))
    for roofline in rooflines:
        one_by_one = [roofline.seconds(shape) for shape in drawn]
        assert roofline.seconds(arrays).tolist() == one_by_one
        assert roofline.seconds(floats).tolist() == one_by_one


@given(contexts.filter(len), st.integers(1, 300))
def test_a_leap_equals_its_steps_to_the_last_bit(rooflines, contexts, k):
    first = make_shape(contexts)
    leap = first._replace(
        decode_context_tokens=first.decode_context_tokens + first.decode_seqs * np.arange(k)
    )
    for roofline in rooflines:
        steps = [make_shape([context + i for context in contexts]) for i in range(k)]
        assert roofline.seconds(leap).tolist() == [roofline.seconds(step) for step in steps]


def test_iterations_beyond_the_tables_are_priced_alike(rooflines):
    tokens = NUM_TABULATED_TOKENS + np.array([-1, 0, 1, 100_000])
    many = IterationShape(0, 0, 1, tokens, tokens * 10, tokens, 1)
    for roofline in rooflines:
        one_by_one = [roofline.seconds(IterationShape(0, 0, 1, t, t * 10, t, 1)) for t in tokens.tolist()]
        assert roofline.seconds(many).tolist() == one_by_one
        assert one_by_one == sorted(one_by_one)


@given(shapes)
def test_the_breakdown_sums_to_the_iteration(rooflines, shape):
    for roofline in rooflines:
        parts = roofline.breakdown(shape)
        assert tuple(parts) == COMPONENTS
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(roofline.seconds(shape), rel=1e-12)


def test_the_breakdown_of_many_iterations_has_their_shape(rooflines):
    leap = make_shape([100])._replace(decode_context_tokens=np.arange(100, 110))
    for roofline in rooflines:
        assert {part.shape for part in roofline.breakdown(leap).values()} == {(10,)}
        assert sum(roofline.breakdown(leap).values()) == pytest.approx(roofline.seconds(leap), rel=1e-12)


@given(shapes, st.integers(1, 4096), st.booleans())
def test_a_larger_batch_is_never_cheaper(rooflines, shape, size, decode):
    if decode:
        more = shape._replace(
            decode_seqs=shape.decode_seqs + 1,
            decode_context_tokens=shape.decode_context_tokens + size,
            sampled_seqs=shape.sampled_seqs + 1,
        )
    else:
        assume(shape.prefill_tokens)  # the first chunk ends a graph's replay, and with it the padding
        more = shape._replace(
            prefill_seqs=shape.prefill_seqs + 1,
            prefill_tokens=shape.prefill_tokens + size,
            prefill_pairs=shape.prefill_pairs + causal_pairs(size),
            prefill_context_tokens=shape.prefill_context_tokens + size,
        )
    for roofline in rooflines:
        assert roofline.seconds(more) >= roofline.seconds(shape)


@given(
    shapes, st.sampled_from(["memory_bandwidth_bytes_per_s", "peak_flops_per_s", "link"]), st.floats(1, 10)
)
def test_a_better_device_is_never_slower(models, devices, shape, figure, factor):
    device = devices["h100_sxm"]
    if figure == "link":
        link = device.scale_up
        better = replace(
            device, scale_up=replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)
        )
    elif figure == "peak_flops_per_s":
        better = replace(device, peak_flops_per_s={"bf16": factor * device.peak_flops_per_s["bf16"]})
    else:
        better = replace(device, memory_bandwidth_bytes_per_s=factor * device.memory_bandwidth_bytes_per_s)
    slow, fast = (
        Roofline(model=models["llama3_1_8b"], device=d, tensor_parallel_size=2) for d in (device, better)
    )
    assert fast.seconds(shape) <= slow.seconds(shape)


def test_a_decode_is_padded_to_the_captured_size(models, devices):
    """9 sequences run as 16: the same GEMMs, elementwise operators; attention and LM head see only 9."""
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"])
    nine, sixteen = (roofline.operator_seconds(make_shape([100] * n)) for n in (9, 16))
    assert nine["gate_up_proj"] == sixteen["gate_up_proj"]
    assert nine["attention_decode"] < sixteen["attention_decode"]


def test_a_small_model_waits_for_its_launches_without_graphs(models, devices):
    """SmolLM2-135M: 30 layers x 10 kernels, embedding, final norm, LM head, 4 of sampling: 307 launches."""
    shape = make_shape([100])
    asked = {
        "model": models["smollm2_135m"],
        "device": devices["h100_sxm"],
        "host": HostOverhead(launch_s=4e-6),
    }
    eager = Roofline(**asked, cuda_graphs=CudaGraphs(enabled=False))
    graphed = Roofline(**asked)
    assert eager.seconds(shape) == pytest.approx(307 * 4e-6 + 704e-6)
    assert eager.breakdown(shape)["launch"] > 0
    assert graphed.breakdown(shape)["launch"] == 0
    assert graphed.seconds(shape) < eager.seconds(shape)


def test_an_overlapped_host_hides_behind_the_gpu(models, devices):
    asked = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"]}
    shape = make_shape([1000] * 8)
    gpu_s = Roofline(**asked, host=NO_HOST).seconds(shape)
    hidden = Roofline(**asked, host=HostOverhead(overlapped=True))
    assert hidden.seconds(shape) == gpu_s
    slow_host = Roofline(**asked, host=HostOverhead(iteration_s=0.1, overlapped=True))
    assert slow_host.seconds(shape) == pytest.approx(0.1 + 8 * 4e-6 + 10e-6)


def test_the_lm_head_costs_nothing_where_no_prompt_completes(rooflines):
    for roofline in rooflines:
        assert roofline.breakdown(make_shape(chunks=[(512, 0)], completed=False))["lm_head"] == 0
        assert roofline.breakdown(make_shape(chunks=[(512, 0)]))["lm_head"] > 0


def test_ranks_without_nvlink_are_priced_with_the_share_of_pcie(models, devices):
    """Two ranks, 65 all-reduces of 8,192 tokens x 4,096 x 2 bytes (64 MiB), half of it sent twice each."""
    shape = make_shape(chunks=[(8192, 0)])
    for name, link_bytes_per_s in [("h100_sxm", 0.70 * 450e9), ("l40s", 0.41 * 32e9)]:
        device = devices[name]
        roofline = Roofline(model=models["llama3_1_8b"], device=device, tensor_parallel_size=2)
        call_s = 2 * device.link.latency_s + 2**26 / link_bytes_per_s + 2.5e-6
        assert roofline.operator_seconds(shape)["all_reduce"] == pytest.approx(65 * call_s)


@given(st.integers(1, 4096))
def test_an_all_reduce_takes_the_faster_of_ring_and_tree(rooflines, num_tokens):
    (all_reduce,) = (priced for priced in rooflines[1].operators if priced.op.name == "all_reduce")
    ring, tree = (transfer.seconds(num_tokens * 8192 * 2) for transfer in all_reduce.algorithms)
    shape = make_shape(chunks=[(num_tokens, 0)])
    assert all_reduce.seconds(shape, num_tokens) == 161 * (min(ring, tree) + 2.5e-6)


def test_t4_prices_a_bf16_checkpoint_in_fp16(models, devices):
    roofline = Roofline(model=models["qwen3_8b"], device=devices["t4"])
    assert roofline.model.dtype == "fp16"
    assert roofline.peak_flops_per_s == 65e12


def test_rejects_ranks_beyond_a_node(models, devices):
    with pytest.raises(ValueError, match="tensor_parallel_size=16: must be 1 to 8"):
        Roofline(model=models["llama3_1_70b"], device=devices["h100_sxm"], tensor_parallel_size=16)
