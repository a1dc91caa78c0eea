"""Tokens per expert and per rank: closed forms, draws, and popular experts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.operators.moe import tiles_and_rows
from hwmodels.operators.moe_routing import (
    ExpertLayer,
    Routing,
    expected_active_experts,
    rank_loads,
    zipf_chances,
)
from tests.hwmodels.operators.moe_layers import (
    BALANCED,
    DEEPSEEK,
    MIXTRAL,
    SKEWED,
    UNIFORM,
    ZIPF,
    layers,
    routings,
    token_counts,
)


def test_active_experts_match_closed_forms():
    assert expected_active_experts(4, MIXTRAL, UNIFORM) == pytest.approx(8 * (1 - 0.75**4))
    assert expected_active_experts([1, 3, 4, 100], MIXTRAL, BALANCED).tolist() == [2, 6, 8, 8]
    # a rank has 32 of 256 experts, and an eighth of the 8 that each token picks
    assert expected_active_experts([1, 4, 4096], DEEPSEEK, BALANCED).tolist() == [1, 4, 32]


def test_skew_touches_fewer_experts_than_chance():
    layer = replace(DEEPSEEK, ep_size=1)
    skewed, uniform, balanced = (
        float(expected_active_experts(32, layer, routing)) for routing in (SKEWED, UNIFORM, BALANCED)
    )
    assert skewed < uniform < balanced == 256


def test_chances_of_zipf_match_hand_calculation():
    """Weights 1, 1/2, 1/3: two picks would give the first 12 / 11. It gets 1, the others share the second."""
    assert zipf_chances(3, 2, 1.0) == pytest.approx([1, 3 / 5, 2 / 5])
    assert zipf_chances(3, 1, 1.0) == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert zipf_chances(4, 4, 2.0).tolist() == [1, 1, 1, 1]


@given(num_experts=st.integers(1, 600), exponent=st.floats(0, 9), share=st.floats(0, 1))
def test_chances_of_zipf_are_a_tokens_picks(num_experts, exponent, share):
    top_k = 1 + int(share * (num_experts - 1))
    chances = zipf_chances(num_experts, top_k, exponent)
    assert chances.sum() == pytest.approx(top_k)
    assert (chances > 0).all()
    assert (chances <= 1 + 1e-12).all()
    assert (np.diff(chances) <= 1e-12).all()


def test_experts_of_zipf_match_hand_calculation():
    """Two tokens, chances 1, 3/5, 2/5: experts get 2, 1.2, 0.8; 1 + (1 - 0.4^2) + (1 - 0.6^2) are active."""
    layer = ExpertLayer(hidden_size=64, intermediate_size=64, top_k=2, num_experts=3)
    loads = rank_loads(2, layer, Routing(kind="zipf", exponent=1))
    assert (loads.num_experts * loads.tokens).tolist() == pytest.approx([2, 1.2, 0.8])
    assert loads.active_experts == pytest.approx(1 + 0.84 + 0.64)


@pytest.mark.parametrize("routing", [UNIFORM, Routing(kind="zipf", exponent=0)], ids=lambda r: r.kind)
def test_zipf_without_skew_is_uniform(routing):
    assert expected_active_experts(4, MIXTRAL, routing) == pytest.approx(8 * (1 - 0.75**4))
    counts = np.array([4, 40, 4096])
    loads = rank_loads(counts, DEEPSEEK, routing)
    assert loads.active_experts == pytest.approx(32 * (1 - (1 - 8 / 256) ** counts))
    assert loads.assignments == pytest.approx(counts)


@pytest.mark.parametrize("exponent", [0.25, 0.5, 1.0, 2.0])
def test_groups_of_like_experts_are_priced_as_experts_are(exponent):
    layer, counts = replace(DEEPSEEK, ep_size=1), np.arange(1, 5000, 7.0)
    chances = np.minimum(1, zipf_chances(256, 8, exponent))
    each = (1 - (1 - chances) ** counts[:, None]).sum(axis=1)
    grouped = expected_active_experts(counts, layer, Routing(kind="zipf", exponent=exponent))
    assert grouped == pytest.approx(each, rel=2e-3)


@given(num_tokens=token_counts, exponent=st.floats(0, 9), experts=st.sampled_from([8, 64, 256, 512]))
def test_zipf_never_keeps_more_experts_busy_than_uniform(num_tokens, exponent, experts):
    layer = ExpertLayer(hidden_size=64, intermediate_size=64, top_k=4, num_experts=experts)
    zipf = Routing(kind="zipf", exponent=exponent)
    active = expected_active_experts(num_tokens, layer, zipf)
    assert 4 * (1 - 1e-9) <= active <= expected_active_experts(num_tokens, layer, UNIFORM) * (1 + 1e-9)


def test_busiest_rank_of_zipf_has_the_most_popular_of_each_round():
    """Four experts, two ranks, top 2: chances 2 (12, 6, 4, 3) / 25; this one has the 1st and 3rd."""
    layer = ExpertLayer(hidden_size=64, intermediate_size=64, top_k=2, num_experts=4, ep_size=2)
    loads = rank_loads([1, 100], layer, Routing(kind="zipf", exponent=1))
    assert loads.assignments == pytest.approx([32 / 25, 3200 / 25])
    lone = replace(layer, num_experts=64, ep_size=64)
    assert expected_active_experts(1, lone, ZIPF) == pytest.approx(1)  # some rank has work


def test_draws_spread_the_tokens_of_an_expert():
    """100 tokens, each with a chance of 1/4 for this expert: binomial, sqrt(100 x 1/4 x 3/4)."""
    loads = rank_loads(100, MIXTRAL, UNIFORM)
    assert loads.tokens == pytest.approx(25)
    assert loads.spread == pytest.approx(4.330, abs=1e-3)
    assert rank_loads(1, MIXTRAL, UNIFORM).spread == pytest.approx(0)  # that has one, if any
    assert rank_loads(100, MIXTRAL, BALANCED).spread == 0


@pytest.mark.parametrize("num_tokens", [3, 40, 250, 400])
def test_tiles_and_rows_match_draws(num_tokens):
    """Binomial tokens of 8 experts, tiles of 64 rows and fewer; the window stands for the bell."""
    drawn = np.random.default_rng(0).binomial(num_tokens, 0.25, size=200_000)
    heights = np.select([drawn == 0, drawn <= 8, drawn <= 16, drawn <= 32], [0, 8, 16, 32], default=64)
    num_tiles = np.ceil(drawn / 64)
    tiles, rows = tiles_and_rows(rank_loads(num_tokens, MIXTRAL, UNIFORM), 64)
    assert tiles == pytest.approx(8 * num_tiles.mean(), rel=0.03)
    assert rows == pytest.approx(8 * (num_tiles * heights).mean(), rel=0.05)


def test_balanced_experts_fill_tiles_together():
    """Eight experts with 16 tokens, 16.25 and 65: 16 rows; a quarter of them 32; two tiles of 64 each."""
    tiles, rows = tiles_and_rows(rank_loads([64, 65, 260], MIXTRAL, BALANCED), 64)
    assert tiles.tolist() == pytest.approx([8, 8, 16])
    assert rows.tolist() == pytest.approx([8 * 16, 6 * 16 + 2 * 32, 16 * 64])


@given(num_tokens=token_counts, layer=layers, routing=routings)
def test_every_token_reaches_top_k_experts(num_tokens, layer, routing):
    loads = rank_loads(num_tokens, replace(layer, ep_size=1), routing)
    assert loads.assignments == pytest.approx(num_tokens * layer.top_k)
    assert loads.tokens.max() <= num_tokens * (1 + 1e-9)
    assert loads.active_experts <= layer.num_experts


def test_busiest_rank_matches_draws():
    """128 experts on 8 ranks, 512 tokens: mean over draws of the fullest rank; popularities as documented."""
    rng = np.random.default_rng(0)
    layer = ExpertLayer(hidden_size=64, intermediate_size=64, top_k=8, num_experts=128, ep_size=8)
    low, high = 1.0 ** (1 - 1.2), (0.8 * 512) ** (1 - 1.2)
    drawn = (low + (high - low) * rng.random((400, 128))) ** (1 / (1 - 1.2))
    tokens = 512 * 8 * drawn / drawn.sum(axis=1, keepdims=True)
    fullest = tokens.reshape(400, 8, 16).sum(axis=2).max(axis=1).mean()

    assert fullest > 1.3 * 512
    assert rank_loads(512, layer, SKEWED).assignments == pytest.approx(fullest, rel=0.1)
