"""Jitter: factors with mean 1 and the given spread, the same however many are read at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.iterations import Jitter, JitterFactors

MANY = 400_000


def factors(jitter, count=MANY, seed=1):
    return JitterFactors(jitter, np.random.default_rng(seed)).of(0, count)


@pytest.mark.parametrize(
    ("jitter", "cv"),
    [
        (Jitter(independent_cv=0.1), 0.1),
        (Jitter(drift_cv=0.1, drift_iterations=5.0), 0.1),
        (Jitter(straggler_share=0.02, straggler_factor=3.0), np.sqrt(0.02 * 0.98) * 2 / 1.04),
        # 1 + cv^2 of a product is the product of 1 + cv^2.
        (Jitter(independent_cv=0.1, drift_cv=0.2, drift_iterations=5.0), np.sqrt(1.01 * 1.04 - 1)),
    ],
)
def test_the_mean_is_one_and_the_spread_as_given(jitter, cv):
    drawn = factors(jitter)
    assert drawn.mean() == pytest.approx(1, abs=0.003)
    assert drawn.std() == pytest.approx(cv, rel=0.02)


def test_one_in_a_hundred_factors_is_beyond_the_quantile_of_the_docstring():
    assert (factors(Jitter(independent_cv=0.1)) > 1.255).mean() == pytest.approx(0.01, rel=0.1)


def test_the_correlation_of_the_drift_falls_to_1_over_e_within_its_iterations():
    logs = np.log(factors(Jitter(drift_cv=0.1, drift_iterations=20.0)))
    logs -= logs.mean()
    correlations = [np.mean(logs[:-lag] * logs[lag:]) / logs.var() for lag in (20, 40)]
    assert correlations == pytest.approx([np.exp(-1), np.exp(-2)], abs=0.03)


def test_stragglers_are_as_rare_and_as_long_as_given():
    drawn = factors(Jitter(straggler_share=0.01, straggler_factor=5.0))
    ordinary, straggler = np.unique(drawn)
    assert straggler / ordinary == pytest.approx(5)
    assert (drawn == straggler).mean() == pytest.approx(0.01, rel=0.1)


def test_without_spread_all_factors_are_exactly_one():
    assert set(factors(Jitter(), 5000)) == {1.0}


@given(steps=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 1200)), max_size=30))
def test_factors_do_not_depend_on_how_they_are_read(steps):
    """Leaps read factors that they do not reach (the second number) and read them again later."""
    jitter = Jitter(independent_cv=0.1, drift_cv=0.1, straggler_share=0.1)
    whole, first = factors(jitter, 30 * 900 + 1200), 0
    stream = JitterFactors(jitter, np.random.default_rng(1))
    for done, ahead in steps:
        read = stream.of(first, done + ahead)
        assert read.tolist() == whole[first : first + done + ahead].tolist()
        first += done


def test_settings_leave_the_draws_alone():
    """Arms of a comparison with other settings have common random numbers."""
    one = np.log(factors(Jitter(independent_cv=0.1), 5000))
    other = np.log(factors(Jitter(independent_cv=0.2, straggler_share=0.0), 5000))
    assert np.corrcoef(one, other)[0, 1] == pytest.approx(1)


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ({"independent_cv": -0.1}, "independent_cv=-0.1: must be >= 0 and <= 10"),
        ({"independent_cv": 1e200}, "must be >= 0 and <= 10"),
        ({"drift_cv": float("nan")}, "drift_cv=nan: must be >= 0 and <= 10"),
        ({"drift_iterations": 0.0}, "drift_iterations=0.0: must be a finite number > 0"),
        ({"straggler_share": 1.0}, "straggler_share=1.0: must be a share, >= 0 and < 1"),
        ({"straggler_factor": 0.5}, "straggler_factor=0.5: must be a finite number >= 1"),
        ({"straggler_factor": float("inf")}, "straggler_factor=inf: must be a finite number >= 1"),
    ],
)
def test_rejects_settings_out_of_range(setting, rule):
    with pytest.raises(ValueError, match=rule):
        Jitter(**setting)


def test_the_sentence_states_the_settings():
    jitter = Jitter(independent_cv=0.015, drift_cv=0.02, straggler_share=0.001, straggler_factor=4.0)
    assert jitter.sentence == (
        "With jitter: 1.5 % from iteration to iteration, a drift of 2 % over 1000 iterations, "
        "0.1 % of the iterations 4 times as long."
    )
