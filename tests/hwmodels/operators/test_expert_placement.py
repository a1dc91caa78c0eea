"""Placement of experts: the busiest rank by hand, copies that relieve it, bounds that placements obey."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.operators.moe_routing import (
    ExpertLayer,
    Routing,
    busiest_rank,
    measured_chances,
    packed,
    rank_loads,
    replicated,
    zipf_chances,
)

LAYER = ExpertLayer(hidden_size=64, intermediate_size=64, top_k=2, num_experts=4, ep_size=2)
DEEPSEEK = ExpertLayer(hidden_size=7168, intermediate_size=2048, top_k=8, num_experts=256, ep_size=32)


def zipf(exponent=0.8, **settings):
    return Routing(kind="zipf", exponent=exponent, **settings)


def busiest_share(routing, layer=DEEPSEEK, num_tokens=4096):
    """Returns the busiest rank's assignments over those of a rank on average."""
    return float(rank_loads(num_tokens, layer, routing).assignments) / (
        num_tokens * layer.top_k / layer.ep_size
    )


def test_copies_go_to_the_fullest_replica():
    """Chances 0.6, 0.3, 0.1: the first copy halves 0.6, of equals the first expert gets one."""
    chances = np.array([0.6, 0.3, 0.1])
    assert replicated(chances, 0).tolist() == pytest.approx([0.6, 0.3, 0.1])
    assert replicated(chances, 1).tolist() == pytest.approx([0.3, 0.3, 0.3, 0.1])
    assert replicated(chances, 2).tolist() == pytest.approx([0.3, 0.2, 0.2, 0.2, 0.1])


def test_the_fullest_replicas_go_to_the_emptiest_ranks():
    assert packed(np.array([0.5, 0.3, 0.3, 0.1]), 2).tolist() == [[0.5, 0.1], [0.3, 0.3]]


def test_busiest_ranks_by_hand():
    """Chances by number; in order 0.8 + 0.1 and 0.7 + 0.4; dealt 0.8 + 0.4; packed 0.4 + 0.7."""
    chances = np.array([0.8, 0.1, 0.7, 0.4])
    assert busiest_rank(chances, 2, "in_order").tolist() == [0.7, 0.4]
    assert busiest_rank(chances, 2, "dealt").tolist() == [0.8, 0.4]
    assert busiest_rank(chances, 2, "eplb").tolist() == [0.7, 0.4]
    assert busiest_rank(chances, 2, "eplb", 2).tolist() == pytest.approx([0.4, 0.35, 0.35])


def test_measured_loads_are_chances_by_number():
    """Tokens 1, 3, 2, 2 of two picks each: 2 x (1, 3, 2, 2) / 8; a dominant expert gets every token."""
    assert measured_chances((1, 3, 2, 2), 2).tolist() == pytest.approx([0.25, 0.75, 0.5, 0.5])
    assert measured_chances((1, 8, 1), 2).tolist() == pytest.approx([0.5, 1.0, 0.5])
    loads = rank_loads([100], LAYER, Routing(kind="measured", loads=(1, 3, 2, 2), placement="in_order"))
    assert loads.assignments.tolist() == pytest.approx([100])


def test_measured_loads_of_zipf_are_zipf():
    counted = tuple(zipf_chances(256, 8, 0.8).tolist())
    few = np.array([1, 7, 4096])
    measured = rank_loads(few, DEEPSEEK, Routing(kind="measured", loads=counted))
    assert measured.assignments == pytest.approx(rank_loads(few, DEEPSEEK, zipf()).assignments)


def test_load_balancing_relieves_the_busiest_of_32_ranks():
    """256 experts, 8 on a rank, Zipf 0.8; DeepSeek-V3 has 32 copies of experts."""
    unbalanced = busiest_share(zipf(placement="scattered"))
    dealt = busiest_share(zipf())
    packed_only = busiest_share(zipf(placement="eplb"))
    balanced = busiest_share(zipf(placement="eplb", num_redundant_experts=32))
    assert (
        unbalanced > dealt > packed_only > 3
    )  # the most popular expert alone has 2.4 times the mean of a rank
    assert balanced == pytest.approx(1, abs=0.002)
    assert busiest_share(Routing()) == pytest.approx(1)


@given(
    loads=st.lists(st.floats(0.01, 100), min_size=16, max_size=16),
    placement=st.sampled_from(["dealt", "in_order", "scattered", "eplb"]),
    copies=st.sampled_from([0, 4, 16]),
)
def test_the_busiest_rank_has_its_share_at_least(loads, placement, copies):
    chances = measured_chances(tuple(loads), 2)
    busiest = busiest_rank(chances, 4, placement, copies if placement == "eplb" else 0)
    assert busiest.sum() >= chances.sum() / 4 - 1e-9
    assert (np.diff(busiest) <= 0).all()
    assert len(busiest) == (4 + copies // 4 if placement == "eplb" else 4)


@given(loads=st.lists(st.floats(0.01, 100), min_size=16, max_size=16))
def test_one_rank_has_every_expert_wherever_it_is(loads):
    chances = measured_chances(tuple(loads), 2)
    for placement in ("dealt", "in_order", "scattered", "eplb"):
        assert busiest_rank(chances, 1, placement).sum() == pytest.approx(2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"placement": "random"}, "placement=random: must be one of dealt, in_order, scattered, eplb"),
        ({"num_redundant_experts": 8}, "num_redundant_experts=8: must be 0 for placement=dealt"),
        ({"num_redundant_experts": -1, "placement": "eplb"}, "num_redundant_experts=-1: must be a whole"),
        ({"kind": "balanced", "exponent": None, "placement": "eplb"}, "must be dealt for balanced routing"),
        ({"kind": "measured", "exponent": None}, "loads=None: must be the tokens of each expert"),
        ({"loads": (1, 2)}, r"loads=\(1, 2\): must be null for zipf routing"),
        ({"kind": "measured", "exponent": None, "loads": (1, 0)}, r"loads\[1\]=0: must be a finite number"),
    ],
)
def test_rejects_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Routing(**({"kind": "zipf", "exponent": 0.8} | settings))


def test_rejects_settings_that_do_not_fit_the_layer():
    with pytest.raises(ValueError, match="loads: 2 numbers are given; must be one for each of the 4 experts"):
        Routing(kind="measured", loads=(1, 2)).check(LAYER)
    with pytest.raises(ValueError, match="num_redundant_experts=3: must be a multiple of expert_parallel_si"):
        zipf(placement="eplb", num_redundant_experts=3).check(LAYER)
