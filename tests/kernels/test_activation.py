from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.activation import gelu_tanh_mul, gelu_tanh_mul_reference, silu_mul, silu_mul_reference
from tests.examples import examples

PAIRS = [(silu_mul, silu_mul_reference), (gelu_tanh_mul, gelu_tanh_mul_reference)]


@examples(8, 20)
@given(
    pair=st.sampled_from(PAIRS),
    num_tokens=st.integers(1, 3),
    size=st.sampled_from([1, 63, 64, 1536, 4095, 4097]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_gate_matches_reference(pair, num_tokens, size, dtype, seed, generator, guarded, assert_close):
    gate, reference = pair
    x = guarded(4 * torch.randn(num_tokens, 2 * size, generator=generator(seed)).to(dtype))
    out = guarded(torch.full((num_tokens, size), torch.nan, dtype=dtype))
    assert gate(x, out=out) is out
    assert_close(out, reference(x), terms=16)  # torch cancels 1 + tanh where the gate is far below zero


def test_gates_match_their_formulas():
    x = torch.tensor([[1.5, -2.0, 3.0, 0.5]])
    silu = [g / (1 + math.exp(-g)) * u for g, u in ((1.5, 3.0), (-2.0, 0.5))]
    assert silu_mul(x)[0].tolist() == pytest.approx(silu, rel=1e-5)
    gelu = [
        0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u
        for g, u in ((1.5, 3.0), (-2.0, 0.5))
    ]
    assert gelu_tanh_mul(x)[0].tolist() == pytest.approx(gelu, rel=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_gates_of_large_inputs_stay_finite():
    x = torch.tensor([[-1e4, 1e4, 1.0, 1.0]])
    for gate, _ in PAIRS:
        assert gate(x)[0].tolist() == [0.0, 1e4]


def test_gate_reads_rows_apart(guarded):
    x = guarded(torch.cat([torch.ones(2, 4), torch.full((2, 3), torch.nan)], dim=1))[:, :4]
    assert torch.equal(silu_mul(x), silu_mul_reference(x))


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.ones(2, 3), "2 \\* size"),
        (torch.ones(2, 4, dtype=torch.int32), "fp32, fp16 or bf16"),
        (torch.ones(4, 2).t(), "contiguous"),
    ],
)
def test_gate_rejects(x, said):
    with pytest.raises(ValueError, match=said):
        silu_mul(x)
