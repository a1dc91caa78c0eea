"""Cost of tokens."""

import math

import pytest

from hwmodels.costs import split_cost


def make_split(**given):
    run = {
        "usd": 1.0,
        "prefill_time_share": 0.25,
        "num_input_tokens": 500_000,
        "num_output_tokens": 100_000,
        "num_requests": 200,
    }
    return split_cost(**{**run, **given})


def test_a_dollar_of_rent_is_split_by_busy_time():
    assert make_split() == pytest.approx((0.5, 7.5, 5.0))


def test_the_parts_add_up_to_the_rent():
    cost = make_split(prefill_time_share=0.7)
    in_all = cost.usd_per_million_input_tokens * 0.5 + cost.usd_per_million_output_tokens * 0.1
    assert in_all == pytest.approx(1.0)


def test_what_nothing_came_out_of_costs_infinitely_much():
    assert make_split(num_input_tokens=0).usd_per_million_input_tokens == math.inf
    assert make_split(num_requests=0).usd_per_thousand_requests == math.inf


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefill_time_share": 1.01}, "prefill_time_share=1.01: must be a share, 0 to 1"),
        ({"prefill_time_share": math.nan}, "prefill_time_share=nan: must be a finite number >= 0"),
        ({"usd": -1}, "usd=-1: must be a finite number >= 0"),
        ({"num_output_tokens": math.inf}, "num_output_tokens=inf: must be a finite number >= 0 tokens"),
    ],
)
def test_split_rejects_impossible_figures(given, message):
    with pytest.raises(ValueError, match=message):
        make_split(**given)
