"""Renewal arrivals of one client: rate and variation of the gaps, and a start in the middle of a gap."""

import numpy as np
import pytest

from sim.workload.distributions import stream
from sim.workload.servegen import Gaps, renewal_times_s

GAMMA = Gaps.of_gamma(5.0, 2.0)
WEIBULL = Gaps(pattern="Weibull", shape=0.5, scale_s=0.1)  # mean 0.1 Gamma(3) = 0.2 s, cv sqrt(5)


@pytest.mark.parametrize(("gaps", "mean_s", "cv"), [(GAMMA, 0.2, 2.0), (WEIBULL, 0.2, 5**0.5)])
def test_gaps_have_the_mean_and_the_variation_of_their_distribution(gaps, mean_s, cv):
    assert gaps.mean_s == pytest.approx(mean_s)
    found = np.diff(renewal_times_s(gaps, stream(0, "test"), 20_000.0))
    assert found.mean() == pytest.approx(mean_s, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize(("gaps", "cv"), [(GAMMA, 2.0), (WEIBULL, 5**0.5)])
def test_the_first_request_comes_after_the_rest_of_a_gap(gaps, cv):
    """The mean rest of a gap at a given moment is E[x^2] / (2 E[x]) = mean (1 + cv^2) / 2."""
    rng = stream(1, "test")
    first_s = np.array([gaps.first_s(rng) for _ in range(40_000)])
    assert first_s.mean() == pytest.approx(gaps.mean_s * (1 + cv**2) / 2, rel=0.05)


def test_the_rate_is_right_from_the_start():
    """A stationary process has rate x time requests in any window, also in a short one at the beginning."""
    counts = [len(renewal_times_s(GAMMA, stream(seed, "test"), 1.0)) for seed in range(4000)]
    assert np.mean(counts) == pytest.approx(5.0, rel=0.08)


def test_times_are_sorted_and_inside():
    times_s = renewal_times_s(WEIBULL, stream(2, "test"), 50.0)
    assert (np.diff(times_s) >= 0).all()
    assert times_s[0] >= 0
    assert times_s[-1] < 50


def test_more_requests_than_memory_holds_are_refused():
    with pytest.raises(ValueError, match=r"1e\+09 requests of one client in 1e\+08 s: must be <= 20,000,000"):
        renewal_times_s(Gaps.of_gamma(10.0, 1.0), stream(0, "test"), 1e8)
