"""A recording's iterations: from the first work to its tokens, without idle time."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from experiments.validate.engine.from_recording import (
    LOADED_S,
    begins_s,
    ends_s,
    measured,
    plan_calls,
    until_s,
)
from experiments.validate.engine.recording import Event, Recording, Step, load
from policies.core.request import Prompt, Request
from sim.records.requests import NAN, RequestLog
from tests.experiments.validate.engine.engine_runs import run_engine, scenario_of, traffic
from tests.experiments.validate.engine.test_recording import WORLDS

torch.set_num_threads(1)

START_S = 10.0


def step(start_s, end_s, read_s=None, *, num_left=1, num_iterations=1, **shape):
    """Returns one launch; times are in seconds since the run began, read_s None means read at its end."""
    numbers = dict.fromkeys(Step._fields, 0) | {
        "start_s": START_S + start_s,
        "end_s": START_S + end_s,
        "read_s": START_S + (end_s if read_s is None else read_s),
        "compute_s": NAN,
        "num_left": num_left,
        "num_iterations": num_iterations,
        "digest": "",
    }
    return Step(**numbers | shape)


def recording(steps, events=(), requests=None):
    table = pd.DataFrame([row._replace(step=i) for i, row in enumerate(steps)], columns=list(Step._fields))
    about = {"start_s": START_S, "num_kv_blocks": 100, "block_size": 16}
    return Recording(
        about, table, RequestLog().table().to_pandas() if requests is None else requests, list(events)
    )


def enter(step, now_s, request_id=0):
    request = Request(request_id, START_S + now_s, Prompt(5))
    return Event(step, "enter", START_S + now_s, request_id, request)


def wait(step, now_s, pause_s=None):
    return Event(step, "wait", START_S + now_s, value=pause_s)


def spans(found):
    """Returns (begin, end) of each launch in milliseconds since the run began."""
    begin_s, end_s = begins_s(found) - START_S, ends_s(found) - START_S
    return [(round(1e3 * begin, 6), round(1e3 * end, 6)) for begin, end in zip(begin_s, end_s, strict=True)]


def test_while_there_is_something_to_do_an_iteration_begins_where_the_last_one_ended():
    """The 2 ms between commit and the next plan are the host's, and in the iteration."""
    found = recording([step(0.001, 0.010), step(0.012, 0.020), step(0.022, 0.030, num_left=0)])
    assert spans(found) == [(1, 10), (10, 20), (20, 30)]


def test_idle_time_is_in_no_iteration():
    """All had ended at 10 ms; the next request is taken in at 49 ms, and planned at 50 ms."""
    found = recording([step(0.001, 0.010, num_left=0), step(0.050, 0.060, num_left=0)], [enter(1, 0.049)])
    assert spans(found) == [(1, 10), (50, 60)]
    assert [one.seen_s - START_S for one in plan_calls(found) if one.request_ids] == [pytest.approx(0.050)]


def test_an_aborted_request_leaves_nothing_to_do():
    """The only one that was left at 10 ms left before the second plan."""
    leave = Event(1, "leave", START_S + 0.012, 0, "aborted")
    found = recording([step(0.001, 0.010), step(0.050, 0.060)], [leave, enter(1, 0.049, 1)])
    assert spans(found) == [(1, 10), (50, 60)]


def test_waiting_for_another_request_is_idle_time():
    """Asked at 12 ms, the policies had nothing to compute until a request came."""
    found = recording([step(0.001, 0.010), step(0.050, 0.060)], [wait(1, 0.012), enter(1, 0.049)])
    assert spans(found) == [(1, 10), (50, 60)]


def test_waking_late_is_the_hosts_time():
    """The policies asked to be called at 42 ms and were called at 50 ms; later requests take part."""
    events = [wait(1, 0.012, 0.030), enter(1, 0.049)]
    found = recording([step(0.001, 0.010), step(0.050, 0.060)], events)
    assert spans(found) == [(1, 10), (42, 60)]
    (seen_s,) = [one.seen_s for one in plan_calls(found) if one.request_ids]
    assert START_S + 0.0419 < seen_s < START_S + 0.042


def test_a_request_that_ends_a_wait_early_begins_the_iteration():
    """The policies would have waited until 42 ms; a batch was full at 30 ms."""
    events = [wait(1, 0.012, 0.030), enter(1, 0.029)]
    found = recording([step(0.001, 0.010), step(0.030, 0.040)], events)
    assert spans(found) == [(1, 10), (30, 40)]
    assert [one.seen_s - START_S for one in plan_calls(found) if one.request_ids] == [pytest.approx(0.030)]


def test_fetching_kv_is_no_idle_time_but_for_a_microsecond_in_which_requests_may_come():
    events = [wait(1, 0.012, 0.0), enter(1, 0.013)]
    found = recording([step(0.001, 0.010), step(0.015, 0.020)], events)
    assert spans(found) == [(1, 10), (10 + 1e3 * LOADED_S, 20)]
    planned = [one for one in plan_calls(found) if one.is_planned]
    assert planned[1].request_ids == (0,)
    assert planned[1].seen_s == planned[1].time_s


def test_a_launch_ahead_begins_when_the_one_before_has_been_read():
    """With overlap: planned at 5 ms, while the first was running until 10 ms."""
    found = recording([step(0.001, 0.004, 0.010), step(0.005, 0.011, 0.019), step(0.012, 0.020, 0.028)])
    assert spans(found) == [(1, 10), (10, 19), (19, 28)]


def test_what_was_never_read_ends_with_its_commit():
    found = recording([step(0.001, 0.010), step(0.010, 0.017, NAN)])
    assert spans(found) == [(1, 10), (10, 17)]


def test_a_request_is_seen_in_the_last_iteration_of_the_launch_before():
    """Four iterations from 10 to 50 ms: requests that come in them are known to the plan at 50 ms."""
    steps = [step(0.001, 0.010), step(0.010, 0.050, num_iterations=4), step(0.051, 0.060)]
    found = recording(steps, [enter(0, 0.0), enter(2, 0.015, 1)])
    seen_s = {request_id: one.seen_s - START_S for one in plan_calls(found) for request_id in one.request_ids}
    assert seen_s[0] == pytest.approx(0.001)
    assert 0.040 < seen_s[1] < 0.050


def test_iterations_of_a_launch_share_its_time_and_contexts_grow_by_a_token_each():
    first = step(0.000, 0.008, decode_seqs=2, decode_context_tokens=30, prefill_tokens=7, kv_tokens_used=40)
    several = step(0.008, 0.020, num_iterations=3, decode_seqs=3, decode_context_tokens=50, kv_tokens_used=60)
    table = measured(recording([first, several])).iterations
    assert table["iteration"].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(table["start_s"], [0.0, 0.008, 0.012, 0.016], atol=1e-12)
    np.testing.assert_allclose(table["duration_s"], [0.008, 0.004, 0.004, 0.004], atol=1e-12)
    assert table["decode_context_tokens"].tolist() == [30, 50, 53, 56]
    assert table["kv_tokens_used"].tolist() == [40, 60, 63, 66]
    assert table["decode_seqs"].tolist() == [2, 3, 3, 3]
    assert table["prefill_tokens"].tolist() == [7, 0, 0, 0]


def test_gaps_are_those_between_tokens_that_were_seen():
    """Tokens at 1, 4, 4 and 9 ms, and an answer of one token: gaps of 3, 0 and 5 ms."""
    found = recording([step(0.001, 0.010)])
    found.token_times_s = {0: [START_S + 1e-3 * ms for ms in (1, 4, 4, 9)], 1: [START_S + 0.002]}
    gaps = measured(found).gaps
    np.testing.assert_allclose(gaps.gap_s, [0.003, 0.0, 0.005], atol=1e-12)
    np.testing.assert_allclose(gaps.gap_end_s, [0.004, 0.004, 0.009], atol=1e-12)
    assert gaps.gap_count.tolist() == [1, 1, 1]
    found.token_times_s = {1: [START_S + 0.002]}
    assert len(measured(found).gaps.gap_s) == 0
    found.token_times_s = {}
    assert measured(found).gaps is None


@pytest.mark.parametrize("max_iterations", [1, 4])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("name", ["chunked", "dynamic", "mlfq"])
def test_iterations_follow_each_other_and_add_up_to_the_time_that_was_not_idle(name, overlap, max_iterations):
    """With a request every 6 ms there are pauses; no token is seen in one."""
    scenario = scenario_of(overlap=overlap, **WORLDS[name])
    found = run_engine(scenario, traffic(gap_s=6e-3), max_iterations=max_iterations)
    run = measured(found)
    table, steps = run.iterations, found.steps
    assert len(table) == steps["num_iterations"].sum()
    start_s, duration_s = table["start_s"].to_numpy(), table["duration_s"].to_numpy()
    assert (duration_s > 0).all()
    idle_s = start_s[1:] - (start_s + duration_s)[:-1]
    assert (idle_s > -1e-12).all()
    last_s = steps["read_s"].max() - found.engine["start_s"]
    assert duration_s.sum() + idle_s[idle_s > 0].sum() + start_s[0] == pytest.approx(last_s, abs=1e-9)
    assert (idle_s > 1e-4).sum() > 3
    # Every token is seen at the end of an iteration.
    seen_s = np.unique(np.concatenate([np.asarray(times_s) for times_s in found.token_times_s.values()]))
    ends = start_s + duration_s + found.engine["start_s"]
    assert np.abs(seen_s[:, None] - ends[None, :]).min(axis=1).max() < 1e-9


def test_users_see_the_times_that_requests_have():
    found = run_engine(scenario_of(**WORLDS["recompute"]), traffic(gap_s=3e-4))
    for row in found.requests.itertuples():
        times_s = found.token_times_s[row.request_id]
        assert (row.first_token_s, row.last_token_s) == (times_s[0], times_s[-1])
        assert len(times_s) == row.output_tokens
        assert row.finished_s >= row.last_token_s
    table = measured(found).requests
    assert table["arrival_s"].is_monotonic_increasing
    assert table["arrival_s"].iloc[0] > 0
    gaps = measured(found).gaps
    several = table[table["output_tokens"] > 1]
    assert gaps.gap_s.sum() == pytest.approx((several["last_token_s"] - several["first_token_s"]).sum())


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_of_a_recording_that_was_cut_short_only_what_had_happened_then_is_there(overlap, tmp_path):
    whole = run_engine(scenario_of(overlap=overlap), traffic(gap_s=3e-3))
    assert until_s(whole) is None
    assert measured(whole).notes == ()
    whole.save(tmp_path)
    lines = (tmp_path / "events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_text("".join(lines[:-6]) + lines[-6][:20])
    part = load(tmp_path)
    run = measured(part, "run 0")
    num_steps = len(part.steps)
    assert 0 < num_steps < len(whole.steps)
    assert run.notes == (f"The recording of run 0 is truncated: its first {num_steps:,} steps are used.",)
    pd.testing.assert_frame_equal(part.steps, whole.steps.iloc[:num_steps])
    pd.testing.assert_frame_equal(run.iterations, measured(whole).iterations.iloc[:num_steps])
    end_s = until_s(part)
    assert end_s == pytest.approx(whole.steps["end_s"].iloc[num_steps - 1] - whole.engine["start_s"])
    before = measured(whole).requests.set_index("request_id")
    unfinished = run.requests[run.requests["status"] == "unfinished"]
    assert 0 < len(unfinished) < len(run.requests) < len(before)
    for row in unfinished.itertuples():
        assert row.output_tokens == row.longest_tokens == len(part.token_times_s.get(row.request_id, []))
        assert row.reason == ""
    for row in run.requests.itertuples():
        then = before.loc[row.request_id]
        assert (row.status == "finished") == (then["finished_s"] <= end_s)
        for name in ("first_token_s", "last_token_s", "finished_s"):
            time_s = getattr(row, name)
            assert time_s == then[name] if then[name] <= end_s else np.isnan(time_s)
    assert len(run.gaps.gap_s) == (measured(whole).gaps.gap_end_s <= end_s).sum()
