"""The checks of a world: every run of it ends, loses nothing, and leaves what every other run leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from experiments.conformance.same_run import assert_same_decisions, assert_same_table, gaps_of
from policies.core.engine import EngineCore
from policies.core.limits import RejectedError
from policies.core.request import Request
from sim.records.run import RunRecords
from sim.setup.scenario import Scenario
from tests.worlds.fuzz.running import Run, run

TABLES = ("requests", "iterations", "events", "own_gaps")
ARRAYS = ("gap_s", "gap_count", "gap_end_s")
NOT_BY_VALUE = (*TABLES, *ARRAYS, "unfilled", "adapters", "interrupted", "speculation")


MAX_ITERATIONS = 10_000
"""Iterations of a run above which it is repeated in leaps only: in steps it would take minutes."""


class Finding(Exception):
    """A world that fails a check."""

    def __init__(self, check: str, message: str, world: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check
        self.world = dict(world or {})


def check_world(scenario: Scenario) -> Run:
    """Runs a world in all ways, a long one only in leaps; returns the usual run. Raises Finding."""
    usual = _checked("run", lambda: run(scenario))
    _checked("conservation", lambda: check_conservation(scenario, usual))
    again = _checked("run again", lambda: run(scenario))
    _checked("same seed, same tables", lambda: assert_same(usual, again))
    if len(usual.records.iterations) > MAX_ITERATIONS:
        return usual
    stepped = _checked("run in steps", lambda: run(scenario, leap=False))
    _checked("leap equals step", lambda: assert_same(usual, stepped, cuts_alike=False))
    if any(pool.caching.has_groups for pool in scenario.pools_by_name.values()):
        return usual  # engines that check themselves have one block table per sequence
    general = _checked("run of engines that check themselves", lambda: run(scenario, records_decisions=True))
    _checked("equal to the records of engines that check themselves", lambda: assert_same(usual, general))
    slow = _checked(
        "run in steps of engines that check themselves",
        lambda: run(scenario, leap=False, records_decisions=True),
    )
    _checked("equal to them in steps", lambda: assert_same(stepped, slow))
    _checked("same decisions in leaps and steps", lambda: assert_same_decisions(general, slow))
    return usual


def _checked(check: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        place = _place_of(error)
        raise Finding(f"{check} ({type(error).__name__}{place})", str(error)) from error


def _place_of(error: Exception) -> str:
    """Returns the line of code at which an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    name = trace.tb_frame.f_globals.get("__name__", "?")
    return f" in {name}.{trace.tb_frame.f_code.co_name}"


def assert_same(one: Run, other: Run, *, cuts_alike: bool = True) -> None:
    """Asserts that two runs are equal bit for bit. cuts_alike: whether they were cut into the same leaps."""
    _assert_same_records(one.records, other.records, cuts_alike)
    assert one.source.ends == other.source.ends, "the ends of requests differ"
    assert one.source.given == other.source.given, "the requests differ"
    mine, others = (json.dumps(run.result.summary, sort_keys=True) for run in (one, other))
    if mine != others:
        differ = [key for key in one.result.summary if _json_differs(one, other, key)]
        raise AssertionError(f"the summaries differ in {differ}")


def _json_differs(one: Run, other: Run, key: str) -> bool:
    texts = [json.dumps(run.result.summary.get(key), sort_keys=True) for run in (one, other)]
    return texts[0] != texts[1]


def _assert_same_records(one: RunRecords, other: RunRecords, cuts_alike: bool) -> None:
    for name in TABLES:
        assert_same_table(getattr(one, name), getattr(other, name))
    if cuts_alike:
        for name in ARRAYS:
            assert getattr(one, name).tolist() == getattr(other, name).tolist(), f"{name} differ"
    else:
        assert gaps_of(one) == gaps_of(other), "gaps differ"
    for field in fields(RunRecords):
        if field.name not in NOT_BY_VALUE:
            mine, others = getattr(one, field.name), getattr(other, field.name)
            assert mine == others, f"{field.name} differs: {mine} and {others}"
    _assert_same_drafts(one, other)
    assert _unfilled(one) == _unfilled(other), "unfilled differs"
    assert _counts(one) == _counts(other), "counts of adapters differ"


def _assert_same_drafts(one: RunRecords, other: RunRecords) -> None:
    mine, others = one.speculation, other.speculation
    if mine is None or others is None:
        assert mine is others, "only one run speculates"
        return
    assert_same_table(mine.acceptance, others.acceptance)
    assert_same_table(mine.bursts, others.bursts)


def _unfilled(records: RunRecords) -> dict[tuple[int, int], int]:
    """Returns the unused token slots by (replica, iteration)."""
    slots: dict[tuple[int, int], int] = {}
    for replica, first, end, num in [] if records.unfilled is None else records.unfilled.tolist():
        for iteration in range(first, end):
            slots[replica, iteration] = slots.get((replica, iteration), 0) + num
    return slots


def _counts(records: RunRecords) -> list[dict[str, Any]]:
    return [{name: getattr(one, name) for name in type(one).__slots__} for one in records.adapters]


def check_conservation(scenario: Scenario, done: Run) -> None:
    """Requires that no request, token or KV block is lost or counted twice."""
    requests = done.records.requests
    ids = requests["request_id"].tolist()
    assert len(ids) == len(set(ids)), "a request has two rows"
    is_whole = scenario.sim.until_s is None and not (done.records.overload or done.records.missed)
    if is_whole:
        assert set(ids) == set(done.source.given), "requests of the traffic have no row"
        left = requests[requests.status == "unfinished"]
        assert left.empty, f"requests {left.request_id.tolist()} have not ended"
    ends = [request_id for request_id, _, _ in done.source.ends]
    assert len(ends) == len(set(ends)), "a request has ended twice"
    ended = requests[requests.status != "unfinished"]
    assert set(ended.request_id.tolist()) == set(ends), "ended requests and reported ends differ"
    _check_tokens(done)
    _check_times(done.records)
    if is_whole:
        _check_engines(done)


def _check_tokens(done: Run) -> None:
    """Requires that a finished request has all of its tokens, and no request has more."""
    cores = [replica.core for replica in done.simulation.replicas]
    for row in done.records.requests.itertuples():
        arrival = done.source.given[row.request_id]
        request, num_tokens = arrival.request, arrival.num_output_tokens
        if row.status == "rejected" or request.branching is not None:
            continue
        allowed = {num for core in cores if (num := _num_allowed(core, request, num_tokens)) is not None}
        assert row.output_tokens <= max(allowed, default=0), f"request {row.request_id} has too many tokens"
        assert row.status != "finished" or row.output_tokens in allowed, (
            f"request {row.request_id} lacks tokens"
        )


def _num_allowed(core: EngineCore, request: Request, num_tokens: int) -> int | None:
    """Returns the output tokens of a request that an engine computes to its end; None: it rejects it."""
    try:
        return core.sequence_of(request, num_tokens)._end_known - request.prompt.num_tokens
    except RejectedError:
        return None


def _check_times(records: RunRecords) -> None:
    """Requires that the times of a request are in order."""
    requests = records.requests
    times = requests[["arrival_s", "scheduled_s", "first_token_s", "last_token_s", "finished_s"]].to_numpy()
    for row, request_id in zip(times, requests["request_id"], strict=True):
        known = row[~np.isnan(row)]
        assert (np.diff(known) >= 0).all(), f"the times of request {request_id} decrease: {row.tolist()}"


def _check_engines(done: Run) -> None:
    """Requires that engines are empty after all requests have ended."""
    for replica in done.simulation.replicas:
        core = replica.core
        core.check_integrity()
        assert not core.unfinished, f"replica {replica.index} still has requests"
        assert not replica.num_outstanding, f"replica {replica.index} counts requests that have ended"
        assert not replica.num_outstanding_tokens, f"replica {replica.index} counts tokens that have ended"
        assert not replica.num_queued_tokens, f"replica {replica.index} counts queued tokens that have ended"
        pool = core.block_pool
        num_kept = getattr(pool, "num_pinned", 0) + (
            0 if core.residents is None else core.residents.num_blocks
        )
        assert pool.num_used == num_kept, (
            f"replica {replica.index}: {pool.num_used - num_kept} blocks are leaked"
        )
        assert len(core.free_slots) == core.max_num_seqs, f"replica {replica.index}: slots are leaked"


def is_pressed(records: RunRecords) -> bool:
    """Returns whether KV memory was short at some time of a run."""
    rows = records.iterations
    return bool(rows["preempted"].sum() or rows["waits_for_memory"].sum() or records.num_evicted_blocks)
