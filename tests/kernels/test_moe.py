"""Mixture of experts: routing, order by expert, grouped GEMM and the whole MLP against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.moe_routing as moe_routing
from kernels.moe import (
    Biases,
    Clamp,
    moe_combine,
    moe_gemm,
    moe_gemm_reference,
    moe_mlp,
    moe_mlp_reference,
)
from kernels.moe_routing import (
    Routing,
    moe_align,
    moe_align_reference,
    moe_route,
    moe_route_reference,
)
from kernels.mxfp4_weight import Mxfp4Weight, dense_mxfp4, quantise_mxfp4


@settings(max_examples=15)
@given(
    tokens=st.sampled_from([1, 4, 5, 9]),
    experts=st.sampled_from([1, 3, 8, 60]),
    choices=st.integers(1, 6),
    renormalise=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_routing_equals_reference(guarded, generator, tokens, experts, choices, renormalise, dtype, seed):
    choices = min(choices, experts)
    logits = guarded(torch.randn(tokens, experts, generator=generator(seed)).to(dtype))
    weights, chosen = moe_route(logits, choices, renormalise=renormalise)
    expected = moe_route_reference(logits, choices, renormalise=renormalise)
    torch.testing.assert_close(weights, expected.weights_TJ)
    assert torch.equal(chosen, expected.experts_TJ)
    if renormalise:
        torch.testing.assert_close(weights.sum(1), torch.ones(tokens))


def test_equal_logits_choose_the_lowest_experts():
    assert moe_route(torch.zeros(2, 6), 3).experts_TJ.tolist() == [[0, 1, 2]] * 2
    logits = torch.tensor([[-1e4, 5.0, -1e4, -1e4]])  # three shares are exactly zero
    assert moe_route(logits, 3).experts_TJ.tolist() == [[1, 0, 2]]


def ordered(alignment):
    """Returns each expert's entries, from its blocks of rows."""
    first, found = 0, []
    for end in alignment.ends_E.tolist():
        assert (end - first) % alignment.block_rows == 0
        rows = alignment.rows[first:end].tolist()
        entries = [row for row in rows if row >= 0]
        assert rows == entries + [-1] * (len(rows) - len(entries))  # padding only behind
        assert len(rows) - len(entries) < alignment.block_rows
        found.append(entries)
        first = end
    return found


@settings(max_examples=15)
@given(
    tokens=st.integers(1, 40),
    experts=st.sampled_from([1, 3, 8, 20]),
    choices=st.integers(1, 4),
    block_rows=st.sampled_from([1, 4, 16]),
    none_share=st.sampled_from([0.0, 0.3, 1.0]),
    small_chunks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_entries_in_the_order_of_their_experts(
    guarded, generator, tokens, experts, choices, block_rows, none_share, small_chunks, seed
):
    random = generator(seed)
    chosen = torch.randint(0, experts, (tokens, choices), generator=random, dtype=torch.int32)
    chosen[torch.rand(tokens, choices, generator=random) < none_share] = -1
    with pytest.MonkeyPatch.context() as patch:
        if small_chunks:  # several programs
            patch.setattr(moe_routing, "ONE_HOT_ELEMENTS", 512)
        alignment = moe_align(guarded(chosen), experts, block_rows)
    flat = chosen.flatten().tolist()
    wanted = [[entry for entry, expert in enumerate(flat) if expert == one] for one in range(experts)]
    assert ordered(alignment) == wanted
    assert ordered(moe_align_reference(chosen, experts, block_rows)) == wanted


@pytest.mark.parametrize("experts", [1, 4, 64])
def test_all_entries_at_one_expert_fit(experts):
    chosen = torch.full((33, 1), experts - 1, dtype=torch.int32)
    assert ordered(moe_align(chosen, experts, 16))[-1] == list(range(33))


@settings(max_examples=8)
@given(
    tokens=st.sampled_from([1, 5, 18]),
    choices=st.integers(1, 2),
    n=st.sampled_from([16, 34, 72]),
    k=st.sampled_from([16, 33, 72]),
    gated=st.booleans(),
    by_token=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_grouped_gemm_equals_reference(
    guarded, generator, assert_close, tokens, choices, n, k, gated, by_token, dtype, seed
):
    random, experts = generator(seed), 3
    chosen = torch.randint(-1, experts, (tokens, choices), generator=random, dtype=torch.int32)
    x = guarded(torch.randn(tokens * (1 if by_token else choices), k, generator=random).to(dtype))
    weight = torch.randn(experts, n, k, generator=random).to(dtype) * k**-0.5
    for expert in range(experts):  # an expert without tokens must not be read
        if expert not in chosen:
            weight[expert] = torch.nan
    weight = guarded(weight)
    alignment = moe_align(chosen, experts, 16)
    actual = moe_gemm(x, weight, alignment, chosen.numel(), gated=gated)
    expected = moe_gemm_reference(x, weight, alignment, chosen.numel(), gated=gated)
    here = chosen.flatten() >= 0
    assert_close(actual[here], expected[here])


@pytest.mark.parametrize("tokens", [1, 3, 24])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mlp_is_the_weighted_sum_of_its_experts(generator, assert_close, tokens, dtype):
    random, (experts, hidden, inner) = generator(tokens), (4, 48, 32)
    x = torch.randn(tokens, hidden, generator=random).to(dtype)
    w13 = (torch.randn(experts, 2 * inner, hidden, generator=random) * hidden**-0.5).to(dtype)
    w2 = (torch.randn(experts, hidden, inner, generator=random) * inner**-0.5).to(dtype)
    routing = moe_route(torch.randn(tokens, experts, generator=random), 2)
    expected = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for weight, expert in zip(routing.weights_TJ[token], routing.experts_TJ[token].tolist(), strict=True):
            gate, up = (w13[expert].float() @ x[token].float()).chunk(2)
            expected[token] += weight * (w2[expert].float() @ (F.silu(gate) * up))
    assert_close(moe_mlp(x, w13, w2, routing), expected.to(dtype), terms=4)
    assert_close(moe_mlp_reference(x, w13, w2, routing), expected.to(dtype), terms=4)


@pytest.mark.parametrize("tokens", [1, 24])
@pytest.mark.parametrize("packed", [False, True])
def test_biases_and_the_clamped_activation(generator, assert_close, tokens, packed):
    random, (experts, hidden, inner) = generator(tokens), (4, 64, 32)
    x = torch.randn(tokens, hidden, generator=random).half()
    weights = [
        torch.randn(shape, generator=random) * 0.4
        for shape in ((experts, 2 * inner, hidden), (experts, hidden, inner))
    ]
    given = [quantise_mxfp4(w) if packed else w.half() for w in weights]
    dense = [dense_mxfp4(w) if packed else w.float() for w in given]
    up_bias, down_bias = (torch.randn(w.shape[:2], generator=random).half() for w in weights)
    clamp, biases = Clamp(1.702, 1.5), Biases(up_bias, down_bias)
    routing = moe_route(torch.randn(tokens, experts, generator=random), 2)
    expected = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for weight, expert in zip(routing.weights_TJ[token], routing.experts_TJ[token].tolist(), strict=True):
            both = dense[0][expert] @ x[token].float() + up_bias[expert].float()
            gate, up = both[:inner].clamp(max=1.5), both[inner:].clamp(-1.5, 1.5)
            inside = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            expected[token] += weight * (dense[1][expert] @ inside + down_bias[expert].float())
    for function in (moe_mlp, moe_mlp_reference):
        found = function(x, *given, routing, biases=biases, clamp=clamp)
        assert_close(found, expected.half(), terms=16)


def test_mxfp4_rounds_to_the_nearest_of_its_numbers(generator):
    weight = torch.randn(3, 5, 64, generator=generator(1)) * 10.0 ** torch.arange(-2, 1)[:, None, None]
    packed = quantise_mxfp4(weight)
    assert packed.codes.shape == (3, 5, 32)
    assert packed.scales.shape == (3, 5, 2)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    every = torch.cat([numbers, -numbers])
    scales = (packed.scales.float() - 127).exp2().repeat_interleave(32, -1)
    nearest = (weight / scales)[..., None].sub(every).abs().min(-1).values * scales
    torch.testing.assert_close((dense_mxfp4(packed) - weight).abs(), nearest)
    assert torch.equal(dense_mxfp4(quantise_mxfp4(dense_mxfp4(packed))), dense_mxfp4(packed))
    byte = Mxfp4Weight(torch.tensor([[0x72] + [0] * 15], dtype=torch.uint8), torch.tensor([[128]]))
    assert dense_mxfp4(byte)[0, :3].tolist() == [2.0, 12.0, 0.0]  # low bits first; 1 and 6, times 2
    with pytest.raises(ValueError, match="48 inputs: mxfp4 supports multiples of 32"):
        quantise_mxfp4(torch.zeros(2, 48))


def test_experts_elsewhere_are_left_out():
    """Expert parallelism: a choice of -1 is another rank's; its rows are never written, and never read."""
    y = torch.tensor([[1.0] * 20, [torch.nan] * 20, [torch.nan] * 20, [torch.nan] * 20]).half()
    routing = Routing(torch.full((2, 2), 0.5), torch.tensor([[0, -1], [-1, -1]], dtype=torch.int32))
    assert torch.equal(moe_combine(y, routing), torch.tensor([[0.5], [0.0]]).half().expand(2, 20))


def test_refusals():
    with pytest.raises(ValueError, match=r"5 of 4 experts: must be 1 to 32 of at most 512"):
        moe_route(torch.zeros(1, 4), 5)
    with pytest.raises(ValueError, match=r"must be contiguous torch.int32"):
        moe_align(torch.zeros(1, 2, dtype=torch.int64), 4, 16)
    with pytest.raises(ValueError, match="must be a power of two"):
        moe_align(torch.zeros(1, 2, dtype=torch.int32), 4, 12)
    alignment = moe_align(torch.zeros(1, 2, dtype=torch.int32), 2, 16)
    with pytest.raises(ValueError, match=r"x is torch.float32"):
        moe_gemm(torch.zeros(1, 16), torch.zeros(2, 8, 16), alignment, 2, gated=False)
    with pytest.raises(ValueError, match=r"2 entries: must be a multiple of the 4 rows"):
        moe_gemm(torch.zeros(4, 16).half(), torch.zeros(2, 8, 16).half(), alignment, 2, gated=False)
    with pytest.raises(ValueError, match="2 rows"):
        moe_combine(
            torch.zeros(3, 8).half(), Routing(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int32))
        )
