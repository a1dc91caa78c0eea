"""Predictors that learn: the histogram and the regression."""

import re
from fractions import Fraction
from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from policies.prediction.histogram import RunningHistogram
from policies.prediction.regression import PromptLengthRegression
from tests.policies.prediction.asked import lengths, request, teach


@given(
    seen=st.lists(lengths, min_size=1, max_size=60),
    tenths=st.integers(1, 10),
    window=st.integers(1, 30),
)
def test_the_histogram_predicts_the_quantile_of_its_window(seen, tenths, window):
    """The smallest length that at least that share of the window did not exceed."""
    predictor = RunningHistogram(quantile=tenths / 10, window=window, min_observations=1)
    teach(predictor, [(1, num_tokens, "a") for num_tokens in seen])
    last = seen[-window:]
    covering = [n for n in last if sum(m <= n for m in last) >= Fraction(tenths, 10) * len(last)]
    assert predictor.predict(request(tenant="a"), None) == min(covering)


def test_the_histograms_quantile_by_hand():
    for quantile, expected in [(0.07, 7), (0.5, 50), (0.9, 90), (0.901, 91), (1, 100)]:
        predictor = RunningHistogram(quantile=quantile)
        teach(predictor, [(1, num_tokens, "") for num_tokens in range(100, 0, -1)])
        assert predictor.predict(request(), None) == expected


def test_tenants_are_separate_and_new_ones_get_the_common_quantile():
    predictor = RunningHistogram(min_observations=3, initial_tokens=64)

    def ask(tenant):
        return predictor.predict(request(tenant=tenant), None)

    assert ask("long") == 64
    teach(predictor, [(1, 10, "short")] * 5 + [(1, 800, "long")] * 2)
    assert (ask("short"), ask("long"), ask("new")) == (10, 10, 10)
    teach(predictor, [(1, 800, "long")])
    assert (ask("short"), ask("long"), ask("new")) == (10, 800, 10)


def test_the_histogram_forgets_what_left_the_window():
    predictor = RunningHistogram(quantile=1, window=3, min_observations=1)
    teach(predictor, [(1, 500, "a"), (1, 20, "a"), (1, 30, "a")])
    assert predictor.predict(request(tenant="a"), None) == 500
    teach(predictor, [(1, 25, "a")])
    assert predictor.predict(request(tenant="a"), None) == 30
    assert predictor.predict(request(tenant="b"), None) == 30


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantile": 0.0}, "quantile=0.0: must be a share, > 0 and <= 1"),
        ({"quantile": 95}, "quantile=95: must be a share"),
        ({"quantile": float("nan")}, "quantile=nan: must be a share"),
        ({"window": 0}, "window=0: must be >= 1"),
        ({"min_observations": 0}, "min_observations=0: must be >= 1"),
        ({"initial_tokens": 0}, "initial_tokens=0: must be >= 1"),
        ({"window": 5}, "min_observations=10: must be <= window=5"),
    ],
)
def test_rejects_histograms_that_predict_nothing(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RunningHistogram(**settings)


def test_the_regression_by_hand():
    """The docstring's numbers: (100, 50) and (400, 100), so 200 -> 50 * sqrt(2)."""
    predictor = PromptLengthRegression(min_observations=2)
    teach(predictor, [(100, 50, ""), (400, 100, "")])
    assert predictor.predict(request(0, 200), None) == 71
    assert predictor.predict(request(0, 100), None) == 50
    assert predictor.predict(request(0, 1600), None) == 100  # the line says 200, longer than any answer seen


def test_the_regression_recovers_a_line_behind_noise():
    """output = 3 * prompt^0.7 * exp(0.4 z): the line at any prompt within 4 standard errors."""
    rng = np.random.default_rng(0)
    prompts = np.round(np.exp(rng.uniform(log(50), log(20_000), 5000))).astype(int)
    outputs = np.round(3 * prompts**0.7 * np.exp(0.4 * rng.standard_normal(5000))).astype(int)
    predictor = PromptLengthRegression()
    teach(predictor, [(int(x), int(y), "") for x, y in zip(prompts, outputs, strict=True)])
    centred = np.log(prompts) - np.log(prompts).mean()
    for prompt in (60, 1000, 15_000):
        distance = log(prompt) - np.log(prompts).mean()
        error = 4 * 0.4 * sqrt(1 / 5000 + distance**2 / (centred**2).sum())
        predicted = predictor.predict(request(0, prompt), None)
        assert log(predicted / (3 * prompt**0.7)) == pytest.approx(0, abs=error + 0.5 / predicted)


@given(history=st.lists(st.tuples(lengths, lengths), min_size=3, max_size=40), prompt=lengths)
def test_the_running_sums_give_the_least_squares_line(history, prompt):
    x, y = np.log(np.array(history, float)).T
    assume(np.ptp(x) == 0 or np.ptp(x) > 1e-3)
    expected = y.mean()
    if np.ptp(x):
        slope, offset = np.polyfit(x - x.mean(), y, 1)
        expected = np.clip(offset + slope * (log(prompt) - x.mean()), y.min(), y.max())
    predictor = PromptLengthRegression(min_observations=2)
    teach(predictor, [(*pair, "") for pair in history])
    assert predictor.predict(request(0, prompt), None) == pytest.approx(exp(expected), rel=1e-6, abs=0.51)


def test_the_regression_waits_for_its_observations():
    predictor = PromptLengthRegression(min_observations=3, initial_tokens=77)
    teach(predictor, [(10, 5, ""), (10, 5, "")])
    assert predictor.predict(request(), None) == 77
    teach(predictor, [(10, 5, "")])
    assert predictor.predict(request(), None) == 5


def test_prompts_of_one_length_get_the_typical_answer():
    predictor = PromptLengthRegression(min_observations=2)
    teach(predictor, [(300, 10, ""), (300, 1000, "")])
    assert predictor.predict(request(0, 5000), None) == 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_observations": 1}, "min_observations=1: must be >= 2"),
        ({"initial_tokens": 0}, "initial_tokens=0: must be >= 1"),
    ],
)
def test_rejects_lines_through_one_point(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PromptLengthRegression(**settings)
