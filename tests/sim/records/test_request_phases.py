"""A request's events, cut into phases."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cluster.clients import Retries
from sim.cluster.failures import Failures, Scripted
from sim.records.event_rows import WAIT_COLUMNS
from sim.records.request_phases import phases_by_request, phases_of
from sim.records.run import FailureKind, events_table

TICK_S = 0.125  # one iteration of the flat toy model


def row(time_s, event, tokens=0, of_tokens=0, **waits):
    columns = dict.fromkeys(WAIT_COLUMNS, 0.0) | {f"wait_{cause}_s": s for cause, s in waits.items()}
    return SimpleNamespace(time_s=time_s, event=event, tokens=tokens, of_tokens=of_tokens, **columns)


def names(found):
    return [(phase.name, phase.start_s, phase.end_s) for phase in found]


def test_a_life_with_everything_in_it():
    rows = [
        row(0.0, "arrive", 8),
        row(1.0, "admit", 0, 8, iteration=0.25, slot=0.75),
        row(2.0, "first_token"),
        row(3.0, "pause"),
        row(4.0, "unpause"),
        row(5.0, "preempt", 10, 11),
        row(6.0, "resume", 0, 11, memory=1.0),
        row(7.0, "prefilled"),
        row(8.0, "preempt_swap", 12, 13),
        row(9.0, "swap_in", 12, 13, memory=1.0),
        row(10.0, "loaded"),
        row(11.0, "resume_swapped", 12, 13, load=2.0),
        row(12.0, "end"),
    ]
    found = phases_of(rows, 99.0)
    assert names(found) == [
        ("waiting", 0.0, 1.0),
        ("prefill", 1.0, 2.0),
        ("decode", 2.0, 3.0),
        ("paused", 3.0, 4.0),
        ("decode", 4.0, 5.0),
        ("preempted", 5.0, 6.0),
        ("prefill", 6.0, 7.0),
        ("decode", 7.0, 8.0),
        ("preempted", 8.0, 9.0),
        ("loading", 9.0, 11.0),
        ("decode", 11.0, 12.0),
    ]
    assert found[0].cause == "slot"
    assert found[0].waited_s == {"iteration": 0.25, "slot": 0.75}
    assert found[9].cause == "load"
    assert found[1].cause == ""


def test_a_prompt_whose_prefix_was_loaded_still_has_its_prefill():
    """7 of 8 prompt tokens came from the host: the last one is computed, and gives the first token."""
    rows = [
        row(0.0, "arrive", 8),
        row(0.0, "load", 7, 8),
        row(1.0, "loaded"),
        row(1.0, "admit", 7, 8, load=1.0),
        row(2.0, "first_token"),
        row(2.0, "end"),
    ]
    expected = [("waiting", 0.0, 0.0), ("loading", 0.0, 1.0), ("prefill", 1.0, 2.0)]
    assert names(phases_of(rows, 9.0)) == expected


def test_what_the_end_of_the_run_cuts_off_lasts_until_then():
    rows = [row(0.0, "arrive", 8), row(1.0, "admit", 0, 8, slot=1.0)]
    assert names(phases_of(rows, 5.0)) == [("waiting", 0.0, 1.0), ("prefill", 1.0, 5.0)]


@given(data=st.data())
def test_phases_follow_each_other_from_arrival_to_end(data, worlds):
    """Every first token ends a prefill, waits have the length of their causes, and no time is missing."""
    records = data.draw(worlds).simulate().records
    requests = records.requests.set_index("request_id")
    by_request = dict(phases_by_request(events_table(records), records.end_s))
    assert set(by_request) == set(requests.index)
    for request_id, phases in by_request.items():
        request = requests.loc[request_id]
        if request["status"] == "rejected":
            assert all(phase.start_s == phase.end_s for phase in phases)
            continue
        assert phases[0].start_s == request["arrival_s"]
        for phase, following in pairwise(phases):
            assert phase.end_s == following.start_s
        assert phases[-1].end_s == (
            records.end_s if request["status"] == "unfinished" else request["finished_s"]
        )
        for phase in phases:
            if phase.name in ("waiting", "preempted", "loading"):
                assert sum(phase.waited_s.values()) == pytest.approx(phase.end_s - phase.start_s, abs=1e-9)
        if request["output_tokens"]:
            assert request["first_token_s"] in [p.end_s for p in phases if p.name == "prefill"]


def test_a_life_with_a_crash_and_a_timeout_is_reported_in_order(make_world, ask):
    """In ticks: lost at 3.5, sent again when a replica serves, at 15.5; its client waits to 19.75, the engine
    releases it at 20.5, and 4 ticks later it comes again.
    """
    crash = Scripted(kind=FailureKind.crash, at_s=3.5 * TICK_S, duration_s=10 * TICK_S)
    clients = Retries(max_attempts=9, base_s=4 * TICK_S, factor=1.0, jitter="none", timeout_s=4.25 * TICK_S)
    records = (
        make_world(ask(0.0, 4, 8), failures=Failures(events=(crash,)), retries=clients).simulate().records
    )
    [(_, phases)] = phases_by_request(events_table(records), records.end_s)
    found = [(phase.name, phase.start_s / TICK_S, phase.end_s / TICK_S, phase.cause) for phase in phases]
    assert found[:3] == [
        ("waiting", 0, 0, ""),
        ("in vain", 0, 3.5, ""),
        ("waiting", 3.5, 15.5, "gateway"),
    ]
    assert found[3:5] == [("in vain", 15.5, 20.5, ""), ("waiting", 20.5, 24.5, "gateway")]
