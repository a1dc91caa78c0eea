"""Tests of passes that verify draft tokens: arrays and numbers, closed forms, and what a row more costs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hwmodels.assembly.roofline import Roofline
from hwmodels.assembly.site import Kernels
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations import AdapterBatch, DraftWork, IterationShape
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.operators.attention import AttentionCurve, DecodeAttention, HeadLayout
from hwmodels.operators.mla import MlaCurve, MlaDecode, MlaHeads
from hwmodels.operators.moe_routing import Routing

few = settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
passes = st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 7)), max_size=40)
"""(context with one new token, draft tokens) of each sequence."""
chunks = st.lists(st.tuples(st.integers(1, 700), st.integers(0, 4000)), max_size=3)
IDLE = HostOverhead(iteration_s=0.0, sequence_s=0.0)


def with_drafts(shape, seqs):
    """Returns the shape with draft tokens for its decodes, which have these (context, draft tokens)."""
    tokens = sum(rows for _, rows in seqs)
    pairs = sum(rows * context + rows * (rows + 1) // 2 for context, rows in seqs)
    drafts = DraftWork(tokens, pairs, len(seqs), max([0, *(rows for _, rows in seqs)]), tokens)
    return shape._replace(sampled_seqs=shape.sampled_seqs + tokens, drafts=drafts)


def passing(num_seqs, context, k):
    """Returns a pass of equal sequences with k draft tokens each."""
    pairs = num_seqs * (k * context + k * (k + 1) // 2)
    rows = num_seqs * (k + 1)
    drafts = DraftWork(num_seqs * k, pairs, num_seqs, k, num_seqs * k)
    return IterationShape(num_seqs, num_seqs * context, 0, 0, 0, 0, rows, drafts=drafts)


def in_one(shapes, dtype=np.int64):
    """Returns many iterations as one shape of arrays."""
    counts = [np.array(column, dtype) for column in zip(*(shape.counts for shape in shapes), strict=True)]
    drafts = [np.array(column, dtype) for column in zip(*(shape.drafts for shape in shapes), strict=True)]
    return IterationShape(*counts, drafts=DraftWork(*drafts))


# Numbers and arrays


@few
@given(drawn=st.lists(st.tuples(passes, chunks).filter(any), min_size=1, max_size=10))
def test_arrays_equal_numbers_to_the_last_bit(roofline, make_shape, drawn):
    shapes = [with_drafts(make_shape([c for c, _ in seqs], of_chunks), seqs) for seqs, of_chunks in drawn]
    one_by_one = [roofline.seconds(shape) for shape in shapes]
    assert roofline.seconds(in_one(shapes)).tolist() == one_by_one
    assert roofline.seconds(in_one(shapes, np.float64)).tolist() == one_by_one


@few
@given(num_seqs=st.integers(1, 300), k=st.integers(1, 7), contexts=st.integers(1, 8000))
def test_a_leap_of_passes_equals_its_steps_to_the_last_bit(roofline, num_seqs, k, contexts):
    """Only contexts and pairs are arrays."""
    steps = [passing(num_seqs, contexts + i, k) for i in range(20)]
    together = in_one(steps)
    leap = steps[0]._replace(
        decode_context_tokens=together.decode_context_tokens,
        drafts=steps[0].drafts._replace(pairs=together.drafts.pairs),
    )
    assert roofline.seconds(leap).tolist() == [roofline.seconds(step) for step in steps]


@few
@given(num_seqs=st.integers(1, 300), context=st.integers(1, 8000), chunk=chunks)
def test_a_pass_without_draft_tokens_is_a_decode(roofline, make_shape, num_seqs, context, chunk):
    decode = make_shape([context] * num_seqs, chunk)
    none = decode._replace(drafts=DraftWork(0, 0, 0, 0, 0))
    assert roofline.seconds(none) == roofline.seconds(decode)
    assert roofline.flops(none) == roofline.flops(decode)
    assert roofline.bytes_moved(none) == roofline.bytes_moved(decode)


def test_adapters_are_priced_beside_draft_tokens(models, devices):
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"])
    shapes = [passing(n, 800, 3)._replace(adapters=AdapterBatch(1, 4 * n, 64 * n, 16)) for n in (1, 7, 50)]
    arrays = in_one(shapes)._replace(
        adapters=AdapterBatch(*(np.array(c) for c in zip(*(s.adapters for s in shapes), strict=True)))
    )
    one_by_one = [roofline.seconds(shape) for shape in shapes]
    assert roofline.seconds(arrays).tolist() == one_by_one
    assert all(
        s > roofline.seconds(shape._replace(adapters=None))
        for s, shape in zip(one_by_one, shapes, strict=True)
    )


# Where the time goes


@few
@given(num_seqs=st.integers(1, 300), context=st.integers(1, 8000), k=st.integers(1, 7), chunk=chunks)
def test_parts_sum_to_the_whole(roofline, make_shape, num_seqs, context, k, chunk):
    shape = with_drafts(make_shape([context] * num_seqs, chunk), [(context, k)] * num_seqs)
    seconds = roofline.seconds(shape)
    assert sum(roofline.breakdown(shape).values()) == pytest.approx(seconds, rel=1e-9)
    assert sum(line.seconds for line in roofline.explain(shape)) == pytest.approx(seconds, rel=1e-9)


@few
@given(num_seqs=st.integers(1, 200), context=st.integers(8, 8000), k=st.integers(1, 6))
def test_a_pass_is_at_least_a_decode_and_grows_with_its_rows(roofline, num_seqs, context, k):
    decode = IterationShape(num_seqs, num_seqs * context, 0, 0, 0, 0, num_seqs)
    once, twice = passing(num_seqs, context, k), passing(num_seqs, context, k + 1)
    for quantity in (roofline.flops, roofline.bytes_moved):
        assert quantity(decode) < quantity(once) < quantity(twice)
    assert roofline.seconds(once) <= roofline.seconds(passing(num_seqs, context + 100, k)) * (1 + 1e-12)


def test_weights_and_keys_are_read_once_and_every_row_is_multiplied(models, devices):
    """Llama-3.1-8B, 4 sequences of 1,000 tokens with 3 draft tokens each; 128 KiB of KV per token."""
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"])
    decode, verify = passing(4, 1000, 0), passing(4, 1000, 3)
    assert roofline.bytes_moved(verify) - roofline.bytes_moved(decode) == 12 * 128 * 1024
    weights = 2 * models["llama3_1_8b"].num_matmul_parameters
    attention = 4 * 32 * 32 * 128 * (12 * 1000 + 4 * 6)
    assert roofline.flops(verify) - roofline.flops(decode) == 12 * weights + attention


def test_rows_are_padded_to_multiples_of_a_sequences_rows():
    """The ladder 1, 2, 4, 8, 16, 24, 32 with 5 rows each: 5, 5, 5, 10, 20, 25, 32 (the largest, not 35)."""
    graphs = CudaGraphs(max_capture_size=32)
    padded = graphs.padded(5)
    assert [padded[n] for n in (0, 1, 5, 6, 10, 11, 20, 21, 25, 26, 32)] == [
        0,
        5,
        5,
        10,
        10,
        20,
        20,
        25,
        25,
        32,
        32,
    ]
    assert graphs.padded(1) == graphs.padded()
    assert CudaGraphs(enabled=False).padded(5) == [0]


# What a row more costs


def test_one_sequence_verifies_four_tokens_for_little_more_than_a_decode(models, devices):
    """Weights are read once; on an H100 16 GB take 5.8 ms, 5 rows of arithmetic 0.1 ms."""
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"], host=IDLE)
    assert 1 < roofline.seconds(passing(1, 500, 4)) / roofline.seconds(passing(1, 500, 0)) < 1.05


def test_a_large_batch_pays_for_every_row(models, devices):
    """At 2,000 sequences GEMMs are bound by arithmetic: five rows take five times as long as one.

    The contexts are still read once, for a time that the start of each sequence sets.
    """
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"], host=IDLE)
    decode, verify = (roofline.breakdown(passing(2000, 100, k)) for k in (0, 4))
    assert verify["gemm"] / decode["gemm"] == pytest.approx(5, rel=0.08)
    assert verify["lm_head"] / decode["lm_head"] == pytest.approx(5, rel=0.08)
    assert 1 < verify["attention"] / decode["attention"] < 1.5
    assert 3.5 < sum(verify.values()) / sum(decode.values()) < 5


def test_long_contexts_are_read_once_for_all_rows(models, devices):
    """MagicDec: with 64 contexts of 32,000 tokens KV outweighs weights 16 times, and rows cost little."""
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"], host=IDLE)
    assert roofline.seconds(passing(64, 32_000, 4)) / roofline.seconds(passing(64, 32_000, 0)) < 1.2


def test_experts_gain_less_than_dense_layers(models, devices):
    """More rows touch more experts, of which one row touches 8 of 128; the routing decides how many."""
    factors = {}
    for name in ("qwen3_30b_a3b", "qwen3_32b"):
        roofline = Roofline(
            model=models[name],
            device=devices["h100_sxm"],
            layout=ParallelLayout(tensor_parallel_size=2),
            host=IDLE,
        )
        factors[name] = roofline.seconds(passing(1, 500, 4)) / roofline.seconds(passing(1, 500, 0))
    assert factors["qwen3_32b"] < 1.1 < 1.3 < factors["qwen3_30b_a3b"]


def test_the_cost_of_rows_in_experts_comes_from_the_routing(models, devices):
    """A skewed routing sends further rows to experts that are loaded anyway."""
    factors = []
    for routing in (Routing(kind="uniform"), Routing(kind="zipf", exponent=1.5)):
        roofline = Roofline(
            model=models["qwen3_30b_a3b"],
            device=devices["h200_sxm"],
            host=IDLE,
            kernels=Kernels(routing=routing),
        )
        factors.append(roofline.bytes_moved(passing(1, 500, 4)) / roofline.bytes_moved(passing(1, 500, 0)))
    assert factors[0] > 1.2 * factors[1]


# Kernels

LLAMA = HeadLayout(num_heads=32, num_kv_heads=8, head_dim=128)


def verify(device, rows, capability="sm90"):
    curve = AttentionCurve(compute_capability=capability)
    return DecodeAttention(LLAMA, device, curve, rows=rows), DecodeAttention(LLAMA, device, curve)


def test_lines_of_a_pass_are_those_of_a_decode_and_one_of_pairs(devices):
    """H100: 1,074e6 bytes of keys and values take 391 us, 1.31e6 pairs 31 us, beside 12 us of start."""
    passed, decode = verify(devices["h100_sxm"], 5)
    of_keys = passed.lines(64)[1]
    assert of_keys == decode.lines(64)[1]
    assert 64 * 4096 * of_keys[1] == pytest.approx(391e-6, rel=2e-3)
    (_, key_s, pair_s, row_s) = passed.lines(64)[-1]
    assert key_s == row_s == 0
    assert 64 * 4096 * 5 * pair_s == pytest.approx(31e-6, rel=2e-2)


def test_an_a100_reads_the_keys_for_every_head_of_a_pass(devices):
    """FlashAttention-2 packs heads and splits contexts for one row only: 4 / 1.5 readings on 32 SMs."""
    passed, decode = verify(devices["a100_80gb_sxm"], 2, "sm80")
    assert passed.lines(1)[1][1] == pytest.approx(decode._token_s * (4 / 1.5) / (32 / 108))
    assert passed.lines(64)[1][1] == pytest.approx(decode._token_s * 4 / 1.5)


def test_more_rows_than_a_tile_read_the_keys_again(devices):
    """40 rows of 4 heads are 160 rows, two tiles of 128, the second of which finds the keys in the L2."""
    passed, decode = verify(devices["h100_sxm"], 40)
    assert passed.lines(64)[1][1] == pytest.approx(decode._token_s * 2 / 1.5)


def test_latent_vectors_are_read_once_and_multiplied_for_every_row(devices):
    heads = MlaHeads(num_heads=128)
    one, three = (MlaDecode(heads, devices["h200_sxm"], MlaCurve(), "vllm", rows) for rows in (1, 3))
    (fixed_s, key_s, no_pair_s, row_s), (_, no_key_s, pair_s, _) = three.lines(64)
    assert no_pair_s == no_key_s == 0
    assert fixed_s + 64 * row_s == pytest.approx(one.lines(64)[0][0])
    assert max(key_s, pair_s) == one.lines(64)[0][1]
    few = replace(heads, num_heads=16)  # 16 heads fill a quarter of a tile of 64, three rows three quarters
    one, three = (MlaDecode(few, devices["h200_sxm"], MlaCurve(), "vllm", rows) for rows in (1, 3))
    assert three.lines(64)[1][2] == pytest.approx(one._pair_s / 3)
