"""Clients that send again: waits by hand and by distribution, and a budget that holds."""

from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest, uniform

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from sim.cluster.clients import Retries
from sim.settings.build import build

NUM = 3000
LEAST_P = 1e-3  # of a test that a right distribution fails; draws are fixed, so it passes or not for good


def waits(attempt, **settings):
    """Draws the waits of NUM clients after that attempt, in seconds."""
    retries = Retries(**settings)
    return np.array([retries.wait_s(request_id, attempt) for request_id in range(NUM)])


def test_without_jitter_waits_double_up_to_the_cap():
    retries = Retries(max_attempts=9, base_s=0.5, factor=2, cap_s=5, jitter="none")
    assert [retries.wait_s(0, k) for k in range(1, 7)] == [0.5, 1, 2, 4, 5, 5]
    assert [retries.next_at(7, k, 100.0) for k in range(1, 4)] == [100.5, 101, 102]


def test_a_late_attempt_waits_for_the_cap_and_not_for_an_overflow():
    retries = Retries(max_attempts=1000, base_s=1, factor=1e300, cap_s=60, jitter="none")
    assert retries.wait_s(0, 999) == 60


@pytest.mark.parametrize(("jitter", "low", "high"), [("full", 0, 4), ("equal", 2, 4)])
def test_jitter_is_uniform_up_to_the_exponential_wait(jitter, low, high):
    drawn = waits(3, base_s=1, factor=2, jitter=jitter)
    assert kstest(drawn, uniform(low, high - low).cdf).pvalue > LEAST_P


def test_the_attempts_of_a_request_are_drawn_apart():
    first, second = (waits(k, base_s=1, factor=1, jitter="full") for k in (1, 2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(NUM)


def test_decorrelated_waits_lie_between_the_base_and_three_times_the_last():
    retries = Retries(max_attempts=9, base_s=1, factor=3, cap_s=20, jitter="decorrelated")
    for request_id in range(300):
        chain = [1.0, *(retries.wait_s(request_id, k) for k in range(1, 8))]
        assert all(1 <= wait_s <= min(20, 3 * last_s) for last_s, wait_s in pairwise(chain))
    first = waits(1, base_s=1, factor=3, cap_s=20, jitter="decorrelated")
    assert kstest(first, uniform(1, 2).cdf).pvalue > LEAST_P


def test_decorrelated_second_wait_has_the_mean_of_its_law():
    """E w2 = E (1 + 3 w1) / 2 = (1 + 3 * 2) / 2 = 3.5; of 3,000, +- 0.1 is beyond four standard errors."""
    second = waits(2, base_s=1, factor=3, cap_s=1e9, jitter="decorrelated")
    assert second.mean() == pytest.approx(3.5, abs=0.1)


def test_draws_depend_on_seed_request_and_attempt_alone():
    one, other = Retries(seed=1), Retries(seed=1)
    asked = [(request_id, attempt) for request_id in range(20) for attempt in (1, 2, 3)]
    forwards = [one.wait_s(*key) for key in asked]
    assert forwards == [other.wait_s(*key) for key in reversed(asked)][::-1]
    assert len(set(forwards)) == len(asked)
    assert not set(forwards) & {Retries(seed=2).wait_s(*key) for key in asked}


def test_the_last_attempt_is_the_last():
    retries = Retries(max_attempts=3)
    assert [retries.next_at(0, k, 0.0) is None for k in (1, 2, 3)] == [False, False, True]
    assert Retries(max_attempts=1).next_at(0, 1, 0.0) is None


@pytest.mark.parametrize("retry_after_s", [None, 0.5, 3.0])
def test_a_refusal_is_honoured_if_it_asks_for_more(retry_after_s):
    polite = Retries(base_s=1, jitter="none")
    deaf = Retries(base_s=1, jitter="none", honours_retry_after=False)
    assert polite.next_at(0, 1, 10.0, retry_after_s) == 10 + max(1, retry_after_s or 0)
    assert deaf.next_at(0, 1, 10.0, retry_after_s) == 11


@pytest.mark.parametrize("honours", [True, False])
def test_never_is_believed_by_every_client_and_costs_no_budget(honours):
    retries = Retries(honours_retry_after=honours, retry_budget=0.0, retry_burst=1)
    assert retries.next_at(0, 1, 0.0, inf) is None
    assert retries.next_at(0, 1, 0.0) is not None
    assert retries.next_at(1, 1, 0.0) is None


@given(
    sends=st.lists(st.booleans(), max_size=300),
    budget=st.sampled_from([0.0, 0.1, 0.2, 1.5]),
    burst=st.sampled_from([1.0, 3.5, 10.0]),
)
def test_retries_stay_within_the_budget(sends, budget, burst):
    """In any stretch of the run, n requests bring at most burst + n budget retries."""
    retries = Retries(max_attempts=1000, retry_budget=budget, retry_burst=burst)
    worst = balance = 0.0
    for is_first in sends:
        if is_first:
            retries.first_sent()
            balance = max(0.0, balance - budget)  # of the stretch that is worst so far
        elif retries.next_at(0, 1, 0.0) is not None:
            balance += 1
            worst = max(worst, balance)
    assert worst <= burst + 1e-9


def test_a_budget_that_is_left_is_used():
    """10 at first; then one in five requests pays for a retry."""
    retries = Retries(retry_budget=0.2, retry_burst=10)
    at_first = sum(retries.next_at(i, 1, 0.0) is not None for i in range(50))
    later = 0
    for i in range(1000):
        retries.first_sent()
        later += retries.next_at(i, 1, 0.0) is not None
    assert at_first == 10
    assert later == pytest.approx(200, abs=1)


def test_every_choice_is_built_and_none_never_sends_again():
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    names = [choice.name for choice in find_groups([CONFIG_DIR])["retries"]]
    built = {
        name: build(source.compose([f"retries={name}", "seed=5"])["retries"], "retries") for name in names
    }
    assert {
        "none",
        "immediate",
        "exponential_backoff",
        "synchronised_backoff",
        "retry_budget",
    } == built.keys()
    assert built["none"].next_at(0, 1, 0.0) is None
    assert built["immediate"].next_at(0, 1, 3.0, 60.0) == 3.0
    assert built["exponential_backoff"].seed == 5
    assert built["retry_budget"].retry_budget == 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_attempts": 0}, r"^max_attempts=0: must be >= 1 \(no retries\) and <= 1000$"),
        ({"max_attempts": 1001}, r"^max_attempts=1001: must be"),
        ({"base_s": -1}, r"^base_s=-1: must be finite and >= 0 s$"),
        ({"factor": 0.5}, r"^factor=0.5: must be finite and >= 1"),
        ({"base_s": 9, "cap_s": 5}, r"^cap_s=5: must be finite and >= base_s=9 s$"),
        ({"cap_s": inf}, r"^cap_s=inf: must be finite"),
        ({"jitter": "half"}, r"^jitter=half: must be one of none, full, equal, decorrelated$"),
        ({"retry_budget": -0.1}, r"^retry_budget=-0.1: must be finite and >= 0"),
        ({"retry_budget": 0.1, "retry_burst": 0.5}, r"^retry_burst=0.5: must be >= 1; a retry takes 1"),
        ({"timeout_s": 0}, r"^timeout_s=0: must be finite and > 0 s$"),
        ({"timeout_until": "byte"}, r"^timeout_until=byte: must be one of answer, first_token$"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Retries(**settings)
