"""Requests that fail, are refused, or end early, in what a client records."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs the extra observe: pip install 'windtunnel[observe]'")

from experiments.observe.figures import client_notes
from experiments.observe.scripted_server import Script
from sim.metrics.output import check_conservation
from sim.records.requests import Status
from tests.experiments.observe.observing import figures, make_workload, records, run


def test_an_endpoint_that_dies_leaves_what_came_and_failures():
    observed, _ = run(
        lambda body: Script(first_s=0.02, gap_s=0.05),
        make_workload(num_requests=60),
        dies_at=30,
        give_up_after=8,
    )
    found = records(observed)
    counts = check_conservation(found)
    assert counts["finished"] >= 1  # those ahead by more than an answer, 0.22 s
    cut = found.requests[found.requests["failed"]]
    assert len(cut) == counts["aborted"] >= 8
    assert (cut["output_tokens"] > 0).any()  # tokens that came before the cut stay
    assert "connections in a row were lost" in observed.load.stopped
    assert counts["arrived"] < 60  # the rest was not sent
    notes = client_notes(figures(observed))
    assert any("requests failed" in text for text in notes)
    assert any("Stopped after" in text for text in notes)


def test_a_broken_stream_is_a_failure_of_its_request_alone():
    observed, _ = run(
        lambda body: Script(dies_after=2 if body["seed"] == 4 and body["prompt"][0] % 2 else None),
        make_workload(num_requests=30),
        seed=4,
    )
    failed = [reply for reply in observed.load.replies if reply.has_failed]
    assert 0 < len(failed) < 30
    assert {reply.num_tokens for reply in failed} == {2}
    assert not observed.load.stopped
    check_conservation(records(observed))


def test_a_refusal_is_rejected_and_no_failure():
    calls = iter(range(1000))
    observed, _ = run(
        lambda body: Script() if next(calls) % 2 == 0 else Script(status=429, error="slow down"),
    )
    summary = figures(observed)
    assert summary["requests"] == {
        "arrived": 20,
        "finished": 10,
        "rejected": 10,
        "aborted": 0,
        "unfinished": 0,
    }
    assert summary["failed"] == {"count": 0, "by_error": {}, "refusals": {"429 slow down": 10}}


def test_an_error_of_the_server_is_a_failure():
    calls = iter(range(1000))
    observed, _ = run(lambda body: Script() if next(calls) % 2 == 0 else Script(status=503, error="dead"))
    assert figures(observed)["failed"]["by_error"] == {"dead": 10}


def test_a_silent_server_fails_after_the_timeout():
    calls = iter(range(1000))
    observed, _ = run(
        lambda body: Script() if next(calls) == 0 else Script(first_s=5.0),
        make_workload(num_requests=3),
        silence_timeout_s=0.2,
    )
    assert [reply.error for reply in observed.load.replies] == ["no data for 0.2 s"] * 3
    assert observed.load.end_s < 2


def test_a_client_without_patience_aborts():
    calls = iter(range(1000))
    observed, _ = run(
        lambda body: Script() if next(calls) == 0 else Script(first_s=0.02, gap_s=0.2),
        make_workload(num_requests=5, patience_s=0.1),
    )
    replies = observed.load.replies
    assert {reply.status for reply in replies} == {Status.aborted}
    assert {reply.num_tokens for reply in replies} == {1}
    assert not any(reply.has_failed for reply in replies)
    assert [reply.ended_s - reply.sent_s for reply in replies] == pytest.approx([0.1] * 5)
    assert any("aborted by their client" in text for text in client_notes(figures(observed)))


def test_until_s_leaves_the_rest_unfinished():
    observed, _ = run(
        lambda body: Script(first_s=0.05, gap_s=0.1),
        make_workload(num_requests=1000, rate_per_s=50),
        until_s=0.4,
    )
    found = records(observed)
    counts = check_conservation(found)
    assert 5 <= counts["unfinished"] <= counts["arrived"] < 1000
    assert found.end_s >= 0.4


def test_all_that_a_dying_endpoint_was_answering_has_failed():
    """30 answers are under way, more than the failures in a row that end a run."""
    lasting = make_workload(num_requests=60, rate_per_s=200, output_tokens=100)
    observed, _ = run(lambda body: Script(gap_s=0.1), lasting, dies_at=30, give_up_after=4)
    statuses = {reply.status for reply in observed.load.replies}
    assert statuses == {Status.aborted}
    assert all(reply.has_failed for reply in observed.load.replies)
    assert len(observed.load.replies) >= 28
    assert "4 connections in a row were lost" in observed.load.stopped


def test_answers_that_hang_when_the_run_is_given_up_have_failed():
    """The first eight answers take 60 s; all later connections are cut."""
    calls = iter(range(1000))

    def script(body: dict[str, Any]) -> Script:
        return Script(gap_s=1.0) if next(calls) < 8 else Script(dies_after=0)

    workload = make_workload(num_requests=60, rate_per_s=50, output_tokens=60)
    observed, _ = run(script, workload, give_up_after=5)
    errors = [reply.error for reply in observed.load.replies]
    assert errors.count("still running when the run gave up") == 7  # one call was the probe's
    assert all(reply.has_failed for reply in observed.load.replies)
    assert 12 <= len(errors) < 30
    assert observed.load.end_s < 5
