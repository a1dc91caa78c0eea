"""timeline.json keeps the rules of the Trace Event Format, and agrees with the tables."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

from experiments.app.cli import main

SMALL = (
    "workload=poisson",
    "workload.num_requests=60",
    "workload.arrivals.rate_per_s=30",
    "engine.num_kv_blocks=400",
    "caching=prefix",
    "replicas=2",
    "output.progress=false",
    "output.report=false",
    "output.timeline=true",
)
PHASES = {"waiting", "preempted", "loading", "prefill", "decode", "paused"}


def simulate(folder: Path, *arguments: str) -> dict:
    assert main(["simulate", *SMALL, f"hydra.run.dir={folder}", *arguments]) == 0
    return json.loads((folder / "timeline.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("timeline")


@pytest.fixture(scope="module")
def trace(folder):
    return simulate(folder)


@pytest.fixture(scope="module")
def requests(trace, folder):
    return pd.read_parquet(folder / "requests.parquet").set_index("request_id")


def of(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_every_event_has_the_fields_that_its_kind_needs(trace):
    needed = {
        "M": {"name", "pid", "tid", "args"},
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "C": {"name", "pid", "ts", "args"},
        "b": {"name", "cat", "id", "pid", "ts"},
        "e": {"name", "cat", "id", "pid", "ts"},
    }
    assert {event["ph"] for event in trace["traceEvents"]} == set(needed)
    for event in trace["traceEvents"]:
        assert needed[event["ph"]] <= set(event)
        assert isinstance(event["pid"], int)
        assert event["pid"] > 0
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
    for event in of(trace, "C"):
        assert all(isinstance(value, int) for value in event["args"].values())


def test_asynchronous_slices_open_and_close_in_pairs_and_nest(trace):
    """Importers read (category, id): each end closes the slice that was opened last."""
    open_: dict[tuple, list] = {}
    last_ts: dict[tuple, float] = {}
    for event in of(trace, "b") + of(trace, "e"):
        assert isinstance(event["id"], str)
    for event in trace["traceEvents"]:
        if event["ph"] not in "be":
            continue
        key = (event["cat"], event["id"])
        assert event["ts"] >= last_ts.get(key, 0.0)
        last_ts[key] = event["ts"]
        if event["ph"] == "b":
            open_.setdefault(key, []).append(event)
            assert len(open_[key]) <= 2
        else:
            began = open_[key].pop()
            assert (began["name"], began["pid"]) == (event["name"], event["pid"])
    assert not any(open_.values())


def test_iterations_of_a_replica_do_not_overlap(trace):
    for pid in (1, 2):
        slices = [event for event in of(trace, "X") if event["pid"] == pid]
        assert slices
        for one, other in pairwise(slices):
            assert round(one["ts"] * 1e3) + round(one["dur"] * 1e3) <= round(other["ts"] * 1e3)


def test_slices_are_the_iterations(trace, folder):
    iterations = pd.read_parquet(folder / "iterations.parquet")
    slices = of(trace, "X")
    assert len(slices) == len(iterations)
    tokens = iterations["decode_seqs"] + iterations["prefill_tokens"]
    assert [event["args"]["tokens"] for event in slices] == tokens.tolist()
    assert [event["ts"] for event in slices] == pytest.approx(
        (iterations["start_s"] * 1e6).tolist(), abs=1e-3
    )
    assert {event["name"] for event in slices} <= {"decode", "mixed", "prefill"}


def test_requests_are_slices_from_arrival_to_end(trace, requests):
    begun = {e["id"]: e["ts"] for e in of(trace, "b") if e["name"] == "request"}
    ended = {e["id"]: e["ts"] for e in of(trace, "e") if e["name"] == "request"}
    assert len(begun) == len(ended) == len(requests) == 60
    for request_id, row in requests.iterrows():
        assert begun[str(request_id)] == pytest.approx(row["arrival_s"] * 1e6, abs=1e-2)
        assert ended[str(request_id)] == pytest.approx(row["finished_s"] * 1e6, abs=1e-2)


def test_waits_are_named_by_their_cause(trace, requests):
    names = [event["name"] for event in of(trace, "b") if event["name"] != "request"]
    assert {name.split(" ")[0] for name in names} <= PHASES
    assert requests["preemptions"].sum() > 0
    assert sum(name == "preempted (memory)" for name in names) == requests["preemptions"].sum()


def test_counters_return_to_zero(trace):
    last = {(event["pid"], event["name"]): event["args"] for event in of(trace, "C")}
    assert last == {
        (pid, name): args
        for pid in (1, 2)
        for name, args in (("sequences", {"running": 0, "waiting": 0}), ("KV blocks", {"used": 0}))
    }


def test_a_cut_timeline_says_so(tmp_path, capsys):
    trace = simulate(tmp_path, "output.timeline_requests=7")
    assert len([e for e in of(trace, "b") if e["name"] == "request"]) == 7
    requests = pd.read_parquet(tmp_path / "requests.parquet")
    first = requests.nsmallest(7, "arrival_s")
    assert max(event["ts"] for event in of(trace, "X")) <= first["finished_s"].max() * 1e6
    assert "the first 7 of 60 requests" in trace["otherData"]["note"]
    assert "the first 7 of 60 requests" in capsys.readouterr().out.replace("\n", " ")


def test_rejects_a_timeline_of_no_request(capsys):
    assert main(["simulate", "output.timeline_requests=0"]) == 2
    assert "output.timeline_requests=0: must be >= 1, or null for all" in capsys.readouterr().err


def test_slices_of_unfinished_and_aborted_requests_are_closed(tmp_path):
    trace = simulate(tmp_path, "sim.until_s=1.5", "workload.patience_s=0.6", "replicas=1")
    statuses = set(pd.read_parquet(tmp_path / "requests.parquet")["status"])
    assert statuses == {"aborted", "unfinished"}
    begun, ended = of(trace, "b"), of(trace, "e")
    assert len(begun) == len(ended)


def test_a_pipeline_has_a_track_a_stage_on_which_micro_batches_wander_down(tmp_path):
    trace = simulate(tmp_path, "pipeline_parallel_size=4", "replicas=1")
    names = {
        event["args"]["name"]: event["tid"] for event in of(trace, "M") if event["name"] == "thread_name"
    }
    tracks = [names[f"stage {stage}"] for stage in (1, 2, 3, 4)]
    assert len(set(tracks)) == 4
    slices = [event for event in of(trace, "X") if event["cat"] == "stage"]
    by_track = [[event for event in slices if event["tid"] == track] for track in tracks]
    for own in by_track:
        for one, other in pairwise(own):
            assert round(one["ts"] * 1e3) + round(one["dur"] * 1e3) <= round(other["ts"] * 1e3)
    for above, below in pairwise(by_track):
        for one, other in zip(above, below, strict=True):
            assert (one["name"], one["args"]) == (other["name"], other["args"])
            assert round(one["ts"] * 1e3) + round(one["dur"] * 1e3) <= round(other["ts"] * 1e3)
    starts = {e["args"]["iteration"]: e["ts"] for e in by_track[0] if e["name"] == "micro-batch 1"}
    iterations = pd.read_parquet(tmp_path / "iterations.parquet")
    assert len(starts) == len(iterations)
    assert all(starts[row.iteration] >= row.start_s * 1e6 - 1e-3 for row in iterations.itertuples())
