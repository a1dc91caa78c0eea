"""A run counts only if it lasts, has enough requests, and does not get slower and slower."""

import numpy as np
import pandas as pd
import pytest

from experiments.study.steady_state import lack_of, requests_needed, steady_part

RNG = np.random.default_rng(0)


def requests(count, lasts_s, *, e2e_s=1.0, ttft_s=None, sessions=None):
    arrival_s = np.linspace(0.0, lasts_s, count)
    ttft_s = RNG.exponential(0.1, count) if ttft_s is None else ttft_s
    table = pd.DataFrame({"arrival_s": arrival_s, "ttft_s": ttft_s, "tpot_s": RNG.normal(0.01, 1e-3, count)})
    table["e2e_s"], table["finished_s"], table["status"] = e2e_s, arrival_s + e2e_s, "finished"
    table["session_id"] = range(count) if sessions is None else sessions
    table["prompt_tokens"], table["cached_tokens"] = 100, 40
    return table


def lack(table, last_s, *, has_sessions=False, target=0.9):
    return lack_of(table, last_s, has_sessions=has_sessions, target=target)


def test_traffic_that_lasts_shows_a_steady_state():
    assert lack(requests(1000, 100.0), 100.0) is None


def test_a_burst_does_not_and_says_how_much_more_is_needed():
    found = lack(requests(50, 0.1), 0.1)
    assert "its traffic lasts 0.1 s, less than 10 times the p90 of E2E" in found.reason
    assert found.times == pytest.approx(100)
    assert found.requests(50) == 512  # eight times at most, a power of the root of two


def test_too_few_requests_for_the_target_decide_nothing():
    assert (
        "measures 300 requests, fewer than the 1,000" in lack(requests(300, 100.0), 100.0, target=0.99).reason
    )
    assert lack(requests(1000, 100.0), 100.0, target=0.99) is None


def test_latencies_that_grow_to_the_end_are_no_steady_state():
    growing = np.linspace(0.1, 20.0, 1000) + RNG.exponential(0.1, 1000)
    assert lack(requests(1000, 400.0, ttft_s=growing), 400.0).reason == "TTFT still grows at its end"
    assert lack(requests(1000, 400.0, ttft_s=growing[::-1].copy()), 400.0) is None


def test_of_sessions_only_the_time_counts_in_which_as_many_end_as_begin():
    """100 sessions of ten requests each, which all begin in 1 s and last 90 s: a burst of sessions."""
    begin_s = np.linspace(0.0, 1.0, 100)
    arrival_s = np.concatenate([begin_s + 10.0 * turn for turn in range(10)])
    table = requests(1000, 1.0, sessions=np.tile(np.arange(100), 10))
    table["arrival_s"], table["finished_s"] = arrival_s, arrival_s + 1.0
    found = lack(table, 1.0, has_sessions=True)
    assert "less than a session and 10 times the p90 of E2E" in found.reason
    assert steady_part(table, 1.0, has_sessions=True) == (1.0, 1.0)
    assert steady_part(table, 500.0, has_sessions=True).start_s == pytest.approx(91, abs=1)


def test_late_turns_with_long_prompts_count_by_their_tokens():
    """Two turns, after 1 and 101 s: of 2 % of the tokens the second one does not matter, of 3 % it does."""
    table = requests(2, 100.0, sessions=[0, 0])
    table["prompt_tokens"], table["cached_tokens"] = [98, 502], [0, 500]
    assert steady_part(table, 500.0, has_sessions=True).start_s == 1.0
    table["cached_tokens"] = [0, 499]
    assert steady_part(table, 500.0, has_sessions=True).start_s == 101.0


def test_the_load_of_sessions_is_whole_where_a_steady_state_begins():
    """Poisson sessions of exponential length, a request a second: the rate is lower before, not after."""
    begin_s = np.sort(RNG.uniform(0.0, 1000.0, 5000))
    turns = 1 + RNG.exponential(100.0, 5000).astype(int)
    arrival_s = np.concatenate(
        [begin + np.arange(number) for begin, number in zip(begin_s, turns, strict=True)]
    )
    table = requests(len(arrival_s), 1.0, sessions=np.repeat(np.arange(5000), turns))
    table["arrival_s"], table["finished_s"] = arrival_s, arrival_s + 1.0
    part = steady_part(table, 1000.0, has_sessions=True)
    assert part.start_s == pytest.approx(100 * np.log(50), rel=0.1)
    rate = part.holds(arrival_s).sum() / (part.end_s - part.start_s)
    nominal = len(arrival_s) / 1000.0
    assert rate == pytest.approx(nominal, rel=0.03)
    early = ((arrival_s > 130.0) & (arrival_s < 230.0)).sum() / 100.0
    assert early < 0.9 * nominal


def needed(**changes):
    given = {"lasts_s": 100.0, "ends_s": 102.0, "e2e_p90_s": 5.0, "target": 0.9} | changes
    return requests_needed(1000, **given)


def test_a_long_run_needs_no_more():
    assert needed() == {}
    assert needed(target=1.0) == {}
    assert needed(e2e_p90_s=10.0) == {}


def test_each_reason_has_its_number():
    assert needed(e2e_p90_s=20.0) == {"backlog": 2000}
    assert needed(ends_s=110.0) == {"drain": 1900}
    assert needed(target=0.999) == {"share": 10_000}
    assert needed(e2e_p90_s=12.341) == {"backlog": 1300}  # rounded up
    assert needed(e2e_p90_s=20.0, ends_s=110.0).keys() == {"backlog", "drain"}
