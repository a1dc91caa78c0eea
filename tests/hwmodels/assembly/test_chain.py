"""Chains of chips with weights in SRAM: closed forms, leaps, and published speeds."""

from dataclasses import replace

import numpy as np
import pytest

from hwmodels.assembly.roofline import Roofline
from hwmodels.device import Chain
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations import IterationShape
from hwmodels.iterations.layout import ParallelLayout

NO_HOST = HostOverhead(iteration_s=0, sequence_s=0, launch_s=0, graph_replay_s=0)
NO_GRAPHS = CudaGraphs(enabled=False)


@pytest.fixture
def on(models):
    """Makes the Roofline of a model on a device without host overhead."""

    def make(model, device, **changes):
        return Roofline(
            model=replace(models[model], **changes), device=device, host=NO_HOST, cuda_graphs=NO_GRAPHS
        )

    return make


@pytest.fixture
def toy(toy_device):
    """Returns a machine of 10 chips: 1e14 bytes/s and 1e18 FLOP/s together, no latency."""
    chain = Chain(num_chips=10, hop_s=0.0, link_bytes_per_s=1e30)
    return replace(
        toy_device,
        memory_bandwidth_bytes_per_s=1e14,
        peak_flops_per_s={"bf16": 1e18},
        l2_bytes=1e3,
        chain=chain,
    )


def decode_s(roofline, seqs, context=1):
    return roofline.seconds(IterationShape(seqs, seqs * context, 0, 0, 0, 0, seqs))


def test_a_token_reads_all_weights_at_the_bandwidth_of_one_chip(on, toy):
    roofline = on("llama3_1_8b", toy)
    weights = roofline.bytes_moved(IterationShape(1, 0, 0, 0, 0, 0, 1))
    least_s = weights / 1e13
    assert least_s < decode_s(roofline, 1) < 1.01 * least_s


def test_as_many_tokens_as_chips_take_as_long_as_one(on, toy):
    roofline = on("llama3_1_8b", toy)
    assert decode_s(roofline, 10, context=0) == decode_s(roofline, 1, context=0)


def test_contexts_are_read_by_one_sequence_per_chip(on, toy, models):
    """1,000 context tokens of one sequence take as long as 10,000 of ten."""
    roofline = on("llama3_1_8b", toy)
    one = decode_s(roofline, 1, 1000) - decode_s(roofline, 1, 0)
    ten = decode_s(roofline, 10, 1000) - decode_s(roofline, 10, 0)
    kv_bytes = 1000 * models["llama3_1_8b"].kv_bytes_per_token(1)
    assert one == pytest.approx(kv_bytes / 1e13, rel=1e-6)
    assert ten == pytest.approx(one, rel=1e-6)


def test_hops_and_layers_add_their_latency(on, toy):
    slower = replace(toy, chain=Chain(num_chips=10, hop_s=1e-3, link_bytes_per_s=1e6, layer_s=1e-4))
    fast, slow = (on("llama3_1_8b", device) for device in (toy, slower))
    links_s = 10 * (1e-3 + 4096 * 2 / 1e6) + 32 * 1e-4
    assert decode_s(slow, 1) - decode_s(fast, 1) == pytest.approx(links_s, rel=1e-6)


def test_long_prompts_use_the_arithmetic_of_all_chips(on, toy, make_shape):
    slow_math = replace(toy, peak_flops_per_s={"bf16": 1e15})
    roofline = on("llama3_1_8b", slow_math)
    shape = make_shape(chunks=[(8000, 0)])
    # the sustained clock share of the default calibration lowers the peak
    assert roofline.seconds(shape) == pytest.approx(roofline.flops(shape) / 0.9e15, rel=0.02)


@pytest.mark.parametrize("name", ["groq_lpu_576", "cerebras_wse3_4"])
def test_leaps_equal_single_iterations(on, devices, name):
    roofline = on("llama3_1_8b", devices[name])
    contexts = np.arange(100, 160, 3)
    many = roofline.seconds(IterationShape(3, contexts, 0, 0, 0, 0, 3))
    one_by_one = [roofline.seconds(IterationShape(3, int(c), 0, 0, 0, 0, 3)) for c in contexts]
    assert many.tolist() == one_by_one


def test_parts_sum_to_the_iteration(on, devices, make_shape):
    roofline = on("llama3_1_8b", devices["groq_lpu_576"])
    shape = make_shape(contexts=[300, 40], chunks=[(64, 0)])
    assert sum(roofline.breakdown(shape).values()) == pytest.approx(roofline.seconds(shape))


def test_groq_is_faster_on_paper_than_published(on, devices):
    """Llama-2-70B in int8: 300 tokens/s per user published, some 2.5 times as many by bandwidth and links.

    The published one: Groq, November 2023. What the chips wait for besides reading and hops is not known.
    """
    roofline = on("llama2_70b", devices["groq_lpu_576"], weights="int8", kv_cache_dtype="fp8")
    tokens_per_s = 1 / decode_s(roofline, 1, 1000)
    assert 2 < tokens_per_s / 300 < 3


def test_cerebras_is_far_faster_on_paper_than_published(on, devices):
    """Llama-3.1-70B in bf16: 450 tokens/s per user published (August 2024), later 2,100 with speculation."""
    roofline = on("llama3_1_70b", devices["cerebras_wse3_4"])
    tokens_per_s = 1 / decode_s(roofline, 1, 1000)
    assert 5 < tokens_per_s / 450 < 10
    assert 1 < tokens_per_s / 2100 < 2


def test_rejects_parallel_layouts(models, devices):
    layout = ParallelLayout(pipeline_parallel_size=2)
    device = replace(devices["groq_lpu_576"], gpus_per_node=2)
    with pytest.raises(ValueError, match="a whole machine of 576 chips; must be 1"):
        Roofline(model=models["llama3_1_8b"], device=device, layout=layout)


@pytest.mark.parametrize("wrong", [{"num_chips": 0}, {"hop_s": -1.0}, {"link_bytes_per_s": 0.0}])
def test_rejects_impossible_chains(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Chain(**{"num_chips": 2, "hop_s": 0.0, "link_bytes_per_s": 1.0} | wrong)
