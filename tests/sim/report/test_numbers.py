"""Figures have the digits that their interval supports, and no more."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.metrics.confidence import Interval
from sim.report.numbers import bounds_text, decimals_of, half_text, mean_text, supported, with_interval


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (35.2, 3.9, "35 ± 4"),
        (35.2, 1.23, "35.2 ± 1.2"),
        (79.2, 265, "80 ± 260"),
        (1234, 265, "1,230 ± 260"),
        (20.4, 0.65, "20.4 ± 0.6"),
        (0.642, 0.002, "0.6420 ± 0.0020"),
        (15781, 9.6, "15,781 ± 10"),
    ],
)
def test_a_mean_is_rounded_as_its_interval(mean, half, text):
    assert with_interval(Interval(mean, mean - half, mean + half, 3)) == text


def test_without_an_interval_there_is_none():
    alone, same = Interval(35.25, math.nan, math.nan, 1), Interval(35.25, 35.25, 35.25, 3)
    for interval in (alone, same):
        assert supported(interval) is None
        assert with_interval(interval) == mean_text(interval) == "35.2"
        assert bounds_text(interval) == half_text(interval) == "–"
    assert with_interval(Interval(math.nan, math.nan, math.nan, 0)) == "–"


def test_bounds_are_rounded_alike_and_turned_by_a_negative_factor():
    assert bounds_text(Interval(35.2, 31.2, 39.1, 3)) == "31 to 39"
    assert bounds_text(Interval(0.25, 0.2, 0.32, 3), -100) == "-32 to -20"


@given(st.floats(1e-6, 1e6))
def test_a_half_width_has_one_digit_or_two_if_it_begins_with_1_or_2(half):
    shown = round(half, decimals_of(half))
    assert shown == pytest.approx(half, rel=0.17)
    digits = f"{shown:.3e}".split("e")[0].replace(".", "").rstrip("0")
    assert len(digits) <= 2
