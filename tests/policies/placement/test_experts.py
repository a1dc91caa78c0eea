"""Placements of experts with copies: as computed by hand, and as the simulator prices them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.operators.moe_routing import packed, replicated
from policies.placement.experts import Eplb, InOrder, in_order


def test_experts_are_loaded_by_number_and_then_the_copies():
    assert in_order(4, 2) == InOrder().place([1, 1, 1, 1], 2) == ((0, 1), (2, 3))
    assert in_order(4, 2, 2) == ((0, 1, 2), (3, 0, 1))


def test_ranks_without_equally_many_slots_are_refused():
    message = r"expert_parallel_size=2: must divide the 7 slots, num_experts=6 \+ num_redundant_experts=1"
    with pytest.raises(ValueError, match=message):
        in_order(6, 2, 1)


def test_a_copy_goes_to_the_expert_with_the_most_tokens_per_copy():
    """60, 30, 10 and a copy: 30, 30, 30, 10, of which a rank has two."""
    slots = Eplb(num_redundant_experts=1).place([60, 30, 10], 2)
    assert sorted(expert for of_rank in slots for expert in of_rank) == [0, 0, 1, 2]
    assert sorted(map(len, slots)) == [2, 2]


@given(
    loads=st.lists(st.integers(0, 1000), min_size=8, max_size=8),
    num_ranks=st.sampled_from([1, 2, 4]),
    num_redundant=st.sampled_from([0, 4, 8]),
)
def test_the_ranks_have_the_tokens_that_the_simulator_prices(loads, num_ranks, num_redundant):
    slots = Eplb(num_redundant_experts=num_redundant).place(loads, num_ranks)
    every = [expert for of_rank in slots for expert in of_rank]
    assert set(every) == set(range(8))
    counts = np.bincount(every, minlength=8)
    found = sorted(sum(loads[expert] / counts[expert] for expert in of_rank) for of_rank in slots)
    priced = packed(replicated(np.array(loads, float), num_redundant), num_ranks)
    np.testing.assert_allclose(found, sorted(priced.sum(axis=1)))
