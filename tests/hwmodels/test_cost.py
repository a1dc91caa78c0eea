"""What tokens cost."""

import math

import pytest

from hwmodels.cost import usd_per_million_tokens


def test_two_dollars_an_hour_at_100_tokens_a_second_is_5_556_a_million():
    assert usd_per_million_tokens(2, 100) == pytest.approx(5.556, abs=0.0005)


def test_no_tokens_cost_infinitely_much_each():
    assert usd_per_million_tokens(2, 0) == math.inf


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_rejects_a_price_or_rate_that_is_negative_or_not_finite(value):
    with pytest.raises(ValueError, match=f"price_usd_per_hour={value}: must be a finite number >= 0"):
        usd_per_million_tokens(value, 100)
    with pytest.raises(ValueError, match=f"tokens_per_s={value}: must be a finite number >= 0"):
        usd_per_million_tokens(1, value)
