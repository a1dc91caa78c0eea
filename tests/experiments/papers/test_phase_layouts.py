"""DistServe's placement search: rates are found, replicas are counted as the phases need them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.papers.phase_layouts import Layout, Placement, Search, best_placement, largest_rate

ONE, TWO = Layout(1, 1), Layout(2, 1)


@given(limit=st.floats(2e-3, 1e4))
def test_a_rate_is_found_to_its_ratio(limit):
    found = largest_rate(lambda rate: rate <= limit, ratio=1.06)
    assert found <= limit <= found * 1.06


def test_refuses_an_slo_that_bounds_nothing():
    with pytest.raises(ValueError, match="100000 requests/s meet the SLO: it limits nothing"):
        largest_rate(lambda rate: True)


def test_what_no_rate_attains_is_zero():
    assert largest_rate(lambda rate: False) == 0.0


def test_the_slower_phase_gets_more_replicas():
    """Decode serves 9 a replica, prefill 3: of 8 GPUs 6 and 2 serve 18."""
    assert best_placement({ONE: 3.0}, {ONE: 9.0}, 8) == Placement(ONE, 6, ONE, 2)


def test_layouts_win_by_their_rate_a_gpu():
    """TP2 serves 7 with prompts, more than twice 3; 3 such replicas serve 21, and 2 of 12 decode that."""
    assert best_placement({ONE: 3.0, TWO: 7.0}, {ONE: 12.0, TWO: 20.0}, 8) == Placement(TWO, 3, ONE, 2)


def test_gpus_that_serve_no_request_are_left_out():
    assert best_placement({ONE: 4.0}, {ONE: 4.0}, 5).num_gpus == 4


def test_refuses_gpus_for_less_than_both_phases():
    with pytest.raises(ValueError, match="gpus=2: must be >= 3, one replica of each phase"):
        best_placement({TWO: 1.0}, {ONE: 1.0}, 2)


@pytest.mark.slow
def test_phases_alone_serve_more_than_both_on_one_gpu():
    """On a small model: one prefill and one decode replica, together, beside each of them alone."""
    search = Search(
        [
            "model=smollm2_135m",
            "hardware=l4",
            "workload=synthetic",
            "workload.lengths.prompt_tokens.mean=4000",
            "workload.lengths.output_tokens.mean=20",
            "slo.ttft_ms=400",
            "slo.tpot_ms=20",
        ],
        num_requests=60,
    )
    prefill, decode = search.prefill_rate(ONE), search.decode_rate(ONE, ONE, num_feeders=8)
    placed = search.placed_rate(Placement(ONE, 1, ONE, 1))
    assert 0 < placed <= min(prefill, decode) * 1.06**2
