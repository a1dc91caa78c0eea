"""Sessions of agents read in parts: the calls of a file read whole, whatever its size, in constant memory."""

import json
import os
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.workload import trace_rows, trace_source
from sim.workload.arrivals import AllAtOnce, Constant, Poisson
from sim.workload.chunks import block_segments
from sim.workload.distributions import stream
from sim.workload.formats import TraceLabJsonl
from sim.workload.trace_source import TraceSource
from sim.workload.untimed_traces import WekaJsonl
from tests.sim.workload.reading_memory import peak_mib_of


def in_parts(patch):
    """Reads few rows at a time, keeps none, writes short runs, and merges three of them at once."""
    patch.setattr(trace_rows, "ROWS", 3)
    patch.setattr(trace_rows, "MAX_VALUES", 30)
    patch.setattr(trace_source, "KEPT_VALUES", -1)
    patch.setattr(trace_rows, "RUN_VALUES", 40)
    patch.setattr(trace_rows, "VALUES_AT_ONCE", 15)
    patch.setattr(trace_rows, "MAX_RUNS", 3)


def write(folder, objects):
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))
    return path


def found_in(source):
    """Returns (time, session, prompt, output, segments) of all requests, which are read twice."""
    found = [
        (
            a.at_s,
            a.request.session_id,
            a.request.prompt.num_tokens,
            a.num_output_tokens,
            a.request.prompt.segments,
        )
        for a in source.arrivals()
    ]
    assert [a.at_s for a in source.arrivals()] == [one[0] for one in found]
    assert (source.num_requests, source.last_arrival_s) == (len(found), found[-1][0])
    return found


@st.composite
def weka_sessions(draw):
    ids = st.lists(st.integers(0, 9) | st.just(10**25), max_size=6)
    calls = st.tuples(st.integers(0, 40), ids, st.integers(1, 9))
    session = st.tuples(
        st.sampled_from([16, 64]), st.sampled_from(["local", "global"]), st.lists(calls, max_size=5)
    )
    first = (16, "local", [(0, [1], 2)])
    return [
        {
            "id": "s",
            "block_size": size,
            "hash_id_scope": scope,
            "requests": [
                {"t": t, "type": "n", "in": size * len(ids) + 1, "out": out, "hash_ids": ids}
                for t, ids, out in calls
            ],
        }
        for size, scope, calls in draw(st.permutations([first, *draw(st.lists(session, max_size=8))]))
    ]


def weka_calls(sessions, begin_s):
    """Returns what `found_in` does, from a file that is read whole and sorted once."""
    numbers, contents, found = count(), {}, []
    for session, (one, at_s) in enumerate(zip([s for s in sessions if s["requests"]], begin_s, strict=True)):
        for row in one["requests"]:
            ids = []
            for key in row["hash_ids"]:
                key = (session if one["hash_id_scope"] == "local" else None, key)
                ids.append(contents[key] if key in contents else contents.setdefault(key, next(numbers)))
            segments = block_segments(tuple(ids), row["in"], one["block_size"])
            found.append((at_s + row["t"], session, row["in"], row["out"], segments))
    return sorted(found, key=lambda call: call[0])


@given(
    sessions=weka_sessions(),
    arrivals=st.sampled_from([Poisson(rate_per_s=0.3), Constant(rate_per_s=0.1), AllAtOnce()]),
    whole=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_calls_of_weka_are_those_of_the_file_read_whole(tmp_path_factory, sessions, arrivals, whole):
    path = write(tmp_path_factory.mktemp("trace"), sessions)
    num_sessions = sum(bool(one["requests"]) for one in sessions)
    begin_s = arrivals.times_s(stream(3, "arrivals"), num_requests=num_sessions, duration_s=None)
    with pytest.MonkeyPatch.context() as patch:
        if not whole:
            in_parts(patch)
        source = WekaJsonl(path=path, arrivals=arrivals).source(seed=3, max_model_len=1000)
        assert found_in(source) == weka_calls(sessions, begin_s.tolist())


@st.composite
def rounds(draw):
    one = st.tuples(
        st.sampled_from(["a", "b", "\ud800", "c\0"]),
        st.integers(0, 40),
        st.integers(1, 300),
        st.integers(0, 300),
        st.integers(0, 2),
    )
    start = datetime(draw(st.sampled_from([1955, 2026])), 1, 31, tzinfo=UTC)
    return [
        {
            "session_id": session,
            "input_tokens_total": total,
            "prefix_tokens": prefix,
            "output_tokens": output,
            "timing_events": [
                {"event_type": "text", "timestamp": (start + timedelta(seconds=at / 4)).isoformat()}
            ],
        }
        for session, at, total, prefix, output in [
            *draw(st.lists(one, max_size=30)),
            ("a", draw(st.integers(0, 40)), 9, 0, 1),
        ]
    ]


def tracelab_calls(rows):
    """Returns what `found_in` does, from a file that is read whole and sorted once."""
    numbers, previous, found = count(), {}, []
    first, at_s = None, lambda row: datetime.fromisoformat(row["timing_events"][0]["timestamp"]).timestamp()
    for row in sorted(rows, key=at_s):
        first = at_s(row) if first is None else first
        earlier, total = previous.get(row["session_id"], []), row["input_tokens_total"]
        kept = earlier[: min(row["prefix_tokens"] // 16, total // 16)]
        ids = previous[row["session_id"]] = kept + [next(numbers) for _ in range(total // 16 - len(kept))]
        if row["output_tokens"]:
            segments = block_segments(tuple(ids), total, 16)
            found.append((at_s(row) - first, None, total, row["output_tokens"], segments))
    return found


@given(rows=rounds(), whole=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rounds_of_tracelab_are_those_of_the_file_read_whole(tmp_path_factory, rows, whole):
    path = write(tmp_path_factory.mktemp("trace"), rows)
    with pytest.MonkeyPatch.context() as patch:
        if not whole:
            in_parts(patch)
        source = TraceLabJsonl(path=path, tokens_per_hash=16).source(seed=0, max_model_len=1000)
        expected = tracelab_calls(rows)
        first_s = expected[0][0] if expected else 0.0  # rounds without output may come before
        assert found_in(source) == [(at_s - first_s, *rest) for at_s, *rest in expected]
        assert source.notes.skipped.get("no output tokens", 0) == len(rows) - source.num_requests


SESSIONS = [
    {
        "id": "s",
        "block_size": 16,
        "hash_id_scope": "local",
        "requests": [
            {"t": 7 * i % 20, "type": "n", "in": 40, "out": 2, "hash_ids": [1, i]} for i in range(5)
        ],
    }
] * 9


@dataclass(frozen=True, kw_only=True, slots=True)
class EverySecond:
    """An arrival process of a user, which draws all times at once. upto: number of times that it has."""

    upto: int = 1000
    name: list[str] | None = None

    def times_s(self, rng, *, num_requests, duration_s):
        return np.arange(min(num_requests, self.upto), dtype=float)


def test_an_arrival_process_that_draws_all_times_at_once_gets_the_number_of_sessions(tmp_path):
    path = write(tmp_path, SESSIONS)
    wanted = weka_calls(SESSIONS, range(9))
    for process in (EverySecond(), EverySecond(name=["has no hash"])):
        assert found_in(WekaJsonl(path=path, arrivals=process).source(seed=0, max_model_len=100)) == wanted
    with pytest.raises(ValueError, match="arrivals: must have a time for each session, and ends after 4"):
        WekaJsonl(path=path, arrivals=EverySecond(upto=4)).source(seed=0, max_model_len=100)


def test_workers_take_over_the_sorted_calls_of_the_command(tmp_path, monkeypatch):
    in_parts(monkeypatch)
    monkeypatch.setattr(trace_source, "_checked", OrderedDict())
    path = write(tmp_path, SESSIONS)
    os.utime(path, ns=(0, 10**15))
    workload = WekaJsonl(path=path, arrivals=Constant(rate_per_s=0.1))
    wanted = found_in(workload.source(seed=5, max_model_len=100))
    checks = trace_source.checks_for_others(tmp_path)
    monkeypatch.setattr(trace_source, "_checked", OrderedDict())  # as in another process
    trace_source.adopt(pickle.loads(pickle.dumps(checks)))
    with monkeypatch.context() as unread:
        unread.setattr(TraceSource, "_check", lambda self: pytest.fail("is checked again"))
        assert found_in(workload.source(seed=5, max_model_len=100)) == wanted
    assert found_in(workload.source(seed=6, max_model_len=100)) == wanted  # equal gaps, but read again


IMPORTS = """
from sim.workload import trace_rows, trace_source
from sim.workload.formats import TraceLabJsonl
from sim.workload.untimed_traces import WekaJsonl
from sim.workload.arrivals import Poisson
trace_rows.RUN_VALUES, trace_source.KEPT_VALUES = 1 << 18, 1 << 16
"""
WORKLOADS = {
    "sessions": "WekaJsonl(path=sys.argv[1], arrivals=Poisson(rate_per_s=1.0))",
    "rounds": "TraceLabJsonl(path=sys.argv[1])",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORKLOADS)
def test_the_memory_of_sessions_does_not_grow_with_the_file(tmp_path, kind):
    """Peak resident memory above that of the start, in processes of their own."""

    def lines(num_sessions):
        for session in range(num_sessions):
            calls = [(session + 0.4 * i, 16 * (i + 1), 16 * i) for i in range(40)]
            if kind == "sessions":
                yield SESSIONS[0] | {
                    "requests": [
                        {
                            "t": t - session,
                            "type": "n",
                            "in": total,
                            "out": 9,
                            "hash_ids": [*range(total // 16)],
                        }
                        for t, total, _ in calls
                    ]
                }
                continue
            for t, total, prefix in calls:
                time = datetime.fromtimestamp(1.7e9 + t, UTC).isoformat()
                yield {
                    "session_id": f"s{session}",
                    "input_tokens_total": total,
                    "prefix_tokens": prefix,
                    "output_tokens": 9,
                    "timing_events": [{"event_type": "text", "timestamp": time}],
                }

    def peak_mib(num_sessions):
        path = write(tmp_path, lines(num_sessions))
        read = f"{WORKLOADS[kind]}.source(seed=0, max_model_len=4096).chunks()"
        return peak_mib_of(IMPORTS, read, path)

    assert peak_mib(6000) < peak_mib(2000) + 16
