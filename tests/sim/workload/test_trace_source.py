"""Traces that are read again instead of kept: the same requests, errors, constant memory, and sorting."""

import json
import math
import os
import pickle
import resource
import subprocess
import sys
import tempfile
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.settings.errors import ConfigError
from sim.workload import trace_rows, trace_source
from sim.workload.base import is_open_loop
from sim.workload.chunks import PartOfSource
from sim.workload.formats import AzureCsv, BurstGptCsv, MooncakeJsonl
from sim.workload.trace_rows import SortedRows, TraceRow, blocks_of_rows
from sim.workload.trace_source import TraceSource
from tests.sim.workload.reading_memory import peak_mib_of

BURSTGPT = "Timestamp,Request tokens,Response tokens\n"


@pytest.fixture
def small_limits(monkeypatch):
    """Reads three rows at a time, keeps none, and writes runs of two blocks."""
    monkeypatch.setattr(trace_rows, "ROWS", 3)
    monkeypatch.setattr(trace_source, "KEPT_VALUES", -1)
    monkeypatch.setattr(trace_rows, "RUN_VALUES", 24)
    monkeypatch.setattr(trace_rows, "VALUES_AT_ONCE", 8)


def replayed(rows, *, start_s, duration_s, max_requests, sort):
    """Selects the rows of a window one by one, as the definition of what a source yields.

    Returns the lines of the requests and the reasons of those left out, or the line of a row out of order.
    """
    end_s = math.inf if duration_s is None else start_s + duration_s
    last_s, lines, skipped = 0.0, [], Counter()
    for row in sorted(rows, key=lambda row: row.arrival_s) if sort else rows:
        if row.arrival_s < last_s:
            return row.line
        last_s = row.arrival_s
        if last_s >= end_s or len(lines) == max_requests:
            break
        if last_s >= start_s:
            if row.skip_reason:
                skipped[row.skip_reason] += 1
            else:
                lines.append(row.line)
    return lines, skipped


@st.composite
def tables(draw):
    times = st.lists(st.integers(0, 12), min_size=1, max_size=40)
    times = draw(st.one_of(times, times.map(sorted)))
    outputs = draw(st.lists(st.integers(0, 3), min_size=len(times), max_size=len(times)))
    return [
        TraceRow(line, time_s / 2, line, output, skip_reason="" if output else "failed: no output tokens")
        for line, (time_s, output) in enumerate(zip(times, outputs, strict=True), 2)
    ]


@given(
    rows=tables(),
    start_s=st.integers(0, 6),
    duration_s=st.none() | st.integers(1, 6),
    max_requests=st.none() | st.integers(1, 20),
    sort=st.booleans(),
    rows_at_once=st.integers(1, 9),
    run_values=st.integers(1, 80),
    max_runs=st.integers(2, 5),
    keeps=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_give_the_requests_of_the_rows_one_by_one(
    tmp_path_factory, rows, start_s, duration_s, max_requests, sort, rows_at_once, run_values, max_runs, keeps
):
    path = tmp_path_factory.mktemp("trace") / "t.csv"
    path.write_text(BURSTGPT + "".join(f"{r.arrival_s},{r.prompt_tokens},{r.output_tokens}\n" for r in rows))
    window = {"start_s": start_s, "duration_s": duration_s, "max_requests": max_requests, "sort": sort}
    wanted = replayed(rows, **window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_rows, "ROWS", rows_at_once)
        patch.setattr(trace_source, "KEPT_VALUES", 1000 if keeps else -1)
        patch.setattr(trace_rows, "RUN_VALUES", run_values)
        patch.setattr(trace_rows, "MAX_RUNS", max_runs)
        patch.setattr(trace_rows, "VALUES_AT_ONCE", 8)
        trace = BurstGptCsv(path=path, **window)
        if not isinstance(wanted, tuple):
            with pytest.raises(ValueError, match=rf"t.csv:{wanted}:1: expected an arrival at or after"):
                trace.source(seed=0, max_model_len=100)
            return
        lines, skipped = wanted
        if not lines:
            with pytest.raises(ValueError, match=r"no request of .* arrives between"):
                trace.source(seed=0, max_model_len=100)
            return
        source = trace.source(seed=0, max_model_len=100)
        for _ in range(2):
            found = [(a.request.request_id, a.request.prompt.num_tokens, a.at_s) for a in source.arrivals()]
            times_s = {row.line: row.arrival_s for row in rows}
            assert found == [(i, line, times_s[line] - start_s) for i, line in enumerate(lines)]
        assert source.notes.skipped == dict(skipped)
        assert (source.num_requests, source.last_arrival_s) == (len(lines), found[-1][2])


@pytest.mark.parametrize("run_values", [1, 10, 1000])
def test_sorting_keeps_contents_tenants_and_remarks(monkeypatch, run_values):
    monkeypatch.setattr(trace_rows, "RUN_VALUES", run_values)
    rows = [
        TraceRow(2, 5.0, 10, 1, (1 << 70, 3), remark="first"),
        TraceRow(3, -2.0, 11, 2, tenant="a", remark="second"),
        TraceRow(4, 5.0, 12, 3, skip_reason="canceled"),
        TraceRow(5, 0.0, 13, 4, (7,), tenant="b"),
    ]
    blocks = [b for row in rows for b in blocks_of_rows(iter([row]))]
    sorted_rows = SortedRows(blocks)
    for _ in range(2):
        found = list(sorted_rows.blocks())
        assert [block.remarks for block in found] == [("first", "second"), *[()] * (len(found) - 1)]
        one = trace_rows.joined(found)
        assert one.line.tolist() == [3, 5, 2, 4]
        assert one.arrival_s.tolist() == [0.0, 2.0, 7.0, 7.0]
        assert one.content_ids.tolist() == [(), (7,), (1 << 70, 3), ()]
        assert one.tenant.tolist() == ["a", "b", "", ""]
        assert one.skip_reason.tolist() == ["", "", "", "canceled"]


def test_bulky_rows_are_read_and_merged_few_at_a_time(monkeypatch, temporary):
    """A run of 500 numbers is merged with 60 in memory; at most three runs are merged at once."""
    monkeypatch.setattr(trace_rows, "MAX_VALUES", 200)
    monkeypatch.setattr(trace_rows, "RUN_VALUES", 500)
    monkeypatch.setattr(trace_rows, "VALUES_AT_ONCE", 60)
    monkeypatch.setattr(trace_rows, "MAX_RUNS", 3)
    rows = [
        TraceRow(line, 7.0 * line % 101, 10, 1, tuple(range(line % 50)), session_id=line)
        for line in range(300)
    ]
    blocks = list(blocks_of_rows(iter(rows)))
    assert max(int(block.num_values().sum()) for block in blocks) < 200 + 4 + 50
    opened = []
    merged = trace_rows._merged
    monkeypatch.setattr(
        trace_rows, "_merged", lambda path, runs: (opened.append(len(runs)), merged(path, runs))[1]
    )
    sorted_rows = SortedRows(blocks)
    for _ in range(2):
        found = list(sorted_rows.blocks())
        assert max(int(block.num_values().sum()) for block in found) < 3 * (60 + 4 + 50)
        one = trace_rows.joined(found)
        wanted = sorted(rows, key=lambda row: row.arrival_s)
        assert one.line.tolist() == one.session_id.tolist() == [row.line for row in wanted]
        assert one.content_ids.tolist() == [row.content_ids for row in wanted]
    assert max(opened) <= 3
    assert len(opened) > 4
    assert len(list(temporary.iterdir())) == 1
    assert len(list(*map(Path.iterdir, temporary.iterdir()))) == 1


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.usefixtures("small_limits")
def test_the_temporary_file_of_a_sort_is_deleted_with_its_source(tmp_path, temporary):
    path = tmp_path / "t.csv"
    path.write_text(BURSTGPT + "".join(f"{i * 7 % 50},{i + 1},1\n" for i in range(50)))
    source = BurstGptCsv(path=path, sort=True).source(seed=0, max_model_len=100)
    assert len(list(temporary.iterdir())) == 1
    sent = pickle.loads(pickle.dumps(source))  # to another process, which must not delete the file
    once = list(source.arrivals())
    assert list(sent.arrivals()) == once
    assert [a.at_s for a in once] == [float(i) for i in range(50)]
    del sent
    assert list(source.arrivals()) == once
    del source
    assert not list(temporary.iterdir())


@pytest.mark.usefixtures("small_limits")
def test_no_temporary_file_remains_after_an_error_and_none_is_written_for_sorted_rows(tmp_path, temporary):
    path = tmp_path / "t.csv"
    path.write_text(BURSTGPT + "".join(f"{50 - i},{i + 1},1\n" for i in range(50)) + "bad,1,1\n")
    with pytest.raises(ValueError, match=r"t.csv:52:1: Timestamp: expected a number"):
        BurstGptCsv(path=path, sort=True).source(seed=0, max_model_len=100)
    assert not list(temporary.iterdir())
    path.write_text(BURSTGPT + "".join(f"{i},{i + 1},1\n" for i in range(50)))
    source = BurstGptCsv(path=path, sort=True).source(seed=0, max_model_len=100)
    assert source.num_requests == 50
    assert not list(temporary.iterdir())


PROGRAM = """
import os, sys
from sim.workload import trace_rows, trace_source
from sim.workload.formats import BurstGptCsv
trace_rows.RUN_VALUES = 24
trace_source.KEPT_VALUES = -1
source = BurstGptCsv(path=sys.argv[1], sort=True).source(seed=0, max_model_len=100)
arrivals = source.arrivals()
next(arrivals)
print(len(os.listdir(os.environ["TMPDIR"])), flush=True)
raise KeyboardInterrupt
"""


@pytest.mark.slow
def test_the_temporary_file_is_deleted_after_ctrl_c(tmp_path, temporary):
    path = tmp_path / "t.csv"
    path.write_text(BURSTGPT + "".join(f"{(i * 7) % 9000},{i % 90 + 1},1\n" for i in range(9000)))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert ended.stdout == "1\n", ended.stderr
    assert "KeyboardInterrupt" in ended.stderr
    assert not list(temporary.iterdir())


@pytest.mark.usefixtures("small_limits")
def test_a_full_disk_is_one_sentence(tmp_path, temporary):
    path = tmp_path / "t.csv"
    path.write_text(BURSTGPT + "".join(f"{5000 - i},{i % 90 + 1},1\n" for i in range(5000)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # writing more fails, as on a full disk
    try:
        with pytest.raises(ValueError, match=r"the sorted rows of a trace cannot be written .*TMPDIR"):
            BurstGptCsv(path=path, sort=True).source(seed=0, max_model_len=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(temporary.iterdir())


@pytest.mark.usefixtures("small_limits")
def test_a_file_that_changes_after_its_check_ends_the_run_with_a_sentence(tmp_path):
    path = tmp_path / "t.csv"
    text = BURSTGPT + "".join(f"{i},{i + 1},1\n" for i in range(50))
    path.write_text(text)
    source = BurstGptCsv(path=path).source(seed=0, max_model_len=100)
    path.write_text(text + "51,1,1\n")
    with pytest.raises(ConfigError, match=r"t.csv: has changed since it was checked; start the run again"):
        list(source.arrivals())
    arrivals = BurstGptCsv(path=path).source(seed=0, max_model_len=100).arrivals()
    next(arrivals)
    path.write_text(text.replace("\n9,", "\nx,"))
    with pytest.raises(ConfigError, match=r"changed since it was checked"):
        list(arrivals)
    path.unlink()
    with pytest.raises(ConfigError, match=r"changed since it was checked"):
        list(source.arrivals())


def test_a_file_is_checked_once_for_all_runs_of_a_process(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_text(BURSTGPT + "1,5,6\n2,500,6\n")
    os.utime(path, ns=(0, 10**15))
    once = BurstGptCsv(path=path).source(seed=0, max_model_len=100)
    wanted = list(once.arrivals())
    once.notes.num_clipped += 7  # by another source around it
    monkeypatch.setattr(BurstGptCsv, "blocks", lambda self: pytest.fail("is read again"))
    again = BurstGptCsv(path=path).source(seed=1, max_model_len=100)
    assert list(again.arrivals()) == wanted
    assert again.notes.num_clipped == 1
    monkeypatch.undo()
    path.write_text(BURSTGPT + "1,5,6\n")
    assert BurstGptCsv(path=path).source(seed=0, max_model_len=100).num_requests == 1


@pytest.mark.parametrize("run_values", [24, 10**6], ids=["in runs", "in memory"])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_another_process_takes_over_the_checks(tmp_path, monkeypatch, is_sorted, run_values):
    monkeypatch.setattr(trace_rows, "RUN_VALUES", run_values)
    monkeypatch.setattr(trace_source, "KEPT_VALUES", 8)
    monkeypatch.setattr(trace_source, "_checked", OrderedDict())
    path = tmp_path / "t.csv"
    times = [1, 9, 4, 20, 3, 15, 7, 30, 2] if is_sorted else range(9)
    path.write_text(BURSTGPT + "".join(f"{time},{50 + time},6\n" for time in times))
    os.utime(path, ns=(0, 10**15))
    trace = BurstGptCsv(path=path, sort=is_sorted)
    source = trace.source(seed=0, max_model_len=75)
    wanted = list(source.arrivals())
    checks = trace_source.checks_for_others(tmp_path)
    assert len(checks) == 1
    assert len(checks[0]) < 2500
    assert (tmp_path / "trace-0.arrow").exists() == is_sorted
    monkeypatch.setattr(trace_source, "_checked", OrderedDict())  # as in another process
    trace_source.adopt(checks)
    with monkeypatch.context() as unread:
        unread.setattr(TraceSource, "_check", lambda self: pytest.fail("is checked again"))
        again = trace.source(seed=0, max_model_len=75)
        assert again.num_requests == 9
        assert again.notes == source.notes
        assert list(again.arrivals()) == wanted
    if is_sorted:  # what the command has left behind is gone
        (tmp_path / "trace-0.arrow").unlink()
        assert list(trace.source(seed=0, max_model_len=75).arrivals()) == wanted


def test_errors_behind_the_first_block_are_found_before_the_run(tmp_path):
    path = tmp_path / "t.csv"
    good = "".join(f"{i},{i % 90 + 1},1\n" for i in range(9000))
    path.write_text(BURSTGPT + good + "9001,7x,1\n" + "9002,7,1\n")
    with pytest.raises(ValueError, match=r"t.csv:9002:6: Request tokens: expected .* found '7x'"):
        BurstGptCsv(path=path).source(seed=0, max_model_len=100)
    assert BurstGptCsv(path=path, max_requests=8999).source(seed=0, max_model_len=9).num_requests == 8999


@dataclass(frozen=True, kw_only=True, slots=True)
class AnyOrderCsv(BurstGptCsv):
    """A format of a user, whose rows are in no order of time."""

    has_any_order: ClassVar[bool] = True


@pytest.mark.usefixtures("small_limits")
def test_rows_of_a_format_without_order_are_sorted_without_a_setting(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(BURSTGPT + "".join(f"{i * 7 % 50},{i + 1},1\n" for i in range(50)))
    wanted = list(BurstGptCsv(path=path, sort=True).source(seed=0, max_model_len=100).arrivals())
    assert list(AnyOrderCsv(path=path).source(seed=0, max_model_len=100).arrivals()) == wanted
    assert [a.at_s for a in wanted] == [float(i) for i in range(50)]


def test_lengths_of_rows_that_are_left_out_may_be_anything(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(BURSTGPT + f"1,{10**30},0\n2,5,6\n")
    source = BurstGptCsv(path=path).source(seed=0, max_model_len=100)
    assert (source.num_requests, source.notes.skipped) == (1, {"failed: no output tokens": 1})


def test_a_part_of_a_trace_is_open_loop_traffic_with_its_contents(tmp_path):
    rows = [
        {"timestamp": i, "input_length": 600, "output_length": 1, "hash_ids": [i, i + 1]} for i in range(10)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = MooncakeJsonl(path=path).source(seed=0, max_model_len=1000)
    whole = list(source.arrivals())
    assert whole[9].request.prompt.segments == ((9, 512), (10, 88))
    part = PartOfSource(source, lambda chunk: chunk.request_id % 3 == 0)
    assert list(part.arrivals()) == whole[::3]
    assert is_open_loop(source)
    assert is_open_loop(part)


def test_sorted_dates_of_a_file_count_from_the_earliest(tmp_path):
    path = tmp_path / "t.csv"
    hours = (10, 9, 12, 9)
    rows = "".join(f"2023-11-16 {hour:02}:00:00.5,{i + 1},1\n" for i, hour in enumerate(hours))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    source = AzureCsv(path=path, sort=True).source(seed=0, max_model_len=100)
    found = [(a.at_s, a.request.prompt.num_tokens) for a in source.arrivals()]
    assert found == [(0.0, 2), (0.0, 4), (3600.0, 1), (10800.0, 3)]


@pytest.mark.slow
def test_the_memory_of_a_trace_does_not_grow_with_its_rows(tmp_path):
    """Peak resident memory above that of the start, in processes of their own."""
    imports = "from sim.workload.formats import PlainCsv"
    read = "PlainCsv(path=sys.argv[1], sort=True).source(seed=0, max_model_len=4096).chunks()"

    def peak_mib(num, order):
        path = tmp_path / "t.csv"
        rng = np.random.default_rng(0)
        times_s = np.cumsum(rng.exponential(0.01, num))[order(num)]
        rows = (f"{time_s:.4f},{i % 900 + 1},{i % 90 + 1}" for i, time_s in enumerate(times_s.tolist()))
        path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows))
        return peak_mib_of(imports, read, path)

    assert peak_mib(1_000_000, np.arange) < peak_mib(300_000, np.arange) + 16
    shuffled = np.random.default_rng(1).permutation
    assert peak_mib(2_000_000, shuffled) < peak_mib(700_000, shuffled) + 32
