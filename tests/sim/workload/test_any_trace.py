"""`workload=trace`: the format, or the columns by their names; what the file does not say is not guessed."""

import gzip
import json

import pandas as pd
import pytest

from sim.workload.any_trace import NAMES, AnyTrace
from sim.workload.formats import BailianJsonl
from tests.sim.workload.test_brought_traces import late_traces, lines, read, write

REQUESTS = [(0.0, 9, 5), (0.5, 7, 3)]


def test_published_formats_are_recognised_and_read_as_their_own_workloads_read_them(tmp_path):
    num_read = 0
    for kind, path in late_traces(tmp_path):
        if kind is BailianJsonl:  # which its hash_ids alone do not tell from Mooncake's
            continue
        requests, remarks = read(AnyTrace(path=path))
        expected, others = read(kind(path=path))
        assert requests == expected, kind
        assert remarks.startswith("The file is read as "), kind
        assert remarks.endswith(others)
        num_read += 1
    assert num_read == 7


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "request_id,arrival_timestamp,prompt_size,token_size\n1,0,9,5\n2,0.5,7,3\n",
            "a splitwise-sim trace",
        ),
        ("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00.1,0,9,5\n", "an Azure LLM"),
        (
            "arrival_s,prompt_tokens,output_tokens\n0,9,5\n",
            "arrival_s,prompt_tokens,output_tokens, times in sec",
        ),
    ],
)
def test_published_csv(tmp_path, text, found):
    requests, remarks = read(AnyTrace(path=write(tmp_path, text)))
    assert requests[0] == (0.0, 9, 5)
    assert f"The file is read as {found}" in remarks


def test_qwens_and_mooncakes_traces_are_told_apart(tmp_path):
    row = {"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [1]}
    later = row | {"timestamp": 500}
    assert read(AnyTrace(path=lines(tmp_path, row, later)))[0][1][0] == 0.5
    chats = [one | {"chat_id": 1} for one in (row, later)]
    requests, remarks = read(AnyTrace(path=lines(tmp_path, *chats)))
    assert requests[1][0] == 500
    assert "a Qwen-Bailian trace, times in seconds" in remarks


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "timestamp_ms,isl,osl\n0,9,5\n500,7,3\n",
            "arrival=timestamp_ms, prompt=isl, output=osl, times in ms",
        ),
        (
            "startTime,prompt_tokens,completion_tokens\n2025-01-01T00:00:00Z,9,5\n2025-01-01T00:00:00.5Z,7,3\n",
            "arrival=startTime, prompt=prompt_tokens, output=completion_tokens, times as dates",
        ),
        ("created,input tokens,output tokens\n1735689600,9,5\n1735689600.5,7,3\n", "arrival=created"),
        ("arrivalTimeMs,InputTokens,OutputTokens\n0,9,5\n500,7,3\n", "arrival=arrivalTimeMs"),
        (
            "send_time_s,user_id,num_prefill_tokens,num_decode_tokens,session_id\n0,a,9,5,x\n.5,b,7,3,y\n",
            "tenant=user_id, session=session_id, times in seconds",
        ),
        ("at_us,time_ns,isl,osl\n1,0,9,5\n2,500000000,7,3\n", "arrival=time_ns"),
    ],
)
def test_columns_are_found_by_their_names(tmp_path, text, found):
    requests, remarks = read(AnyTrace(path=write(tmp_path, text)))
    assert requests == REQUESTS
    assert found in remarks


@pytest.mark.parametrize("kind", ["csv", "jsonl", "list", "pretty", "parquet", "csv.gz"])
def test_all_kinds_of_files(tmp_path, kind):
    rows = [
        {"sent_at": f"2025-06-01 12:00:0{at}", "tokens_in": prompt, "tokens_out": output}
        for at, (_, prompt, output) in zip(("0", "0.5"), REQUESTS, strict=True)
    ]
    path = tmp_path / f"t.{kind}"
    match kind:
        case "csv":
            pd.DataFrame(rows).to_csv(path, index=False)
        case "csv.gz":
            path.write_bytes(gzip.compress(pd.DataFrame(rows).to_csv(index=False).encode()))
        case "parquet":
            pd.DataFrame(rows).assign(
                sent_at=lambda one: pd.to_datetime(one.sent_at, format="ISO8601")
            ).to_parquet(path)
        case "jsonl":
            lines(tmp_path, *rows, name=path.name)
        case _:
            path.write_text(json.dumps(rows, indent=2 if kind == "pretty" else None))
    requests, remarks = read(AnyTrace(path=path))
    assert requests == REQUESTS
    assert "arrival=sent_at" in remarks


def test_columns_and_the_unit_can_be_given(tmp_path):
    path = write(tmp_path, "when,asked,answered,owner,state\n0,9,5,a,ok\n100,4,4,b,timeout\n500,7,3,b,OK\n")
    names = {"arrival": "when", "prompt": "asked", "output": "answered", "tenant": "owner", "status": "state"}
    trace = AnyTrace(path=path, columns=names | {"session": None}, time_unit="ms")
    requests, remarks = read(trace)
    assert requests == REQUESTS
    assert "status=state" in remarks
    source = trace.source(seed=0, max_model_len=100)
    assert [one.request.tenant for one in source.arrivals()] == ["a", "b"]


@pytest.mark.parametrize(("good", "bad"), [("200", "500"), ("length", "error"), ("Succeeded", "Failed")])
def test_statuses_tell_which_rows_were_served(tmp_path, good, bad):
    path = write(tmp_path, f"time_s,isl,osl,state\n0,9,5,{good}\n0.2,8,4,{bad}\n0.5,7,3,{good}\n")
    assert read(AnyTrace(path=path, columns={"status": "state"}))[0] == REQUESTS


def test_contents_are_those_of_the_ids(tmp_path):
    rows = [{"t_s": at, "isl": 64, "osl": 5, "hash_ids": [1, at]} for at in (2, 3)]
    path = lines(tmp_path, *rows)
    given = {"arrival": "t_s"}
    with pytest.raises(ValueError, match=r"tokens_per_hash=null: must be given, as the trace has hash_ids"):
        AnyTrace(path=path, columns=given)
    source = AnyTrace(path=path, columns=given, tokens_per_hash=32).source(seed=0, max_model_len=100)
    first, second = (one.request.prompt.segments for one in source.arrivals())
    assert [first[0] == second[0], first[1] == second[1]] == [True, False]


def test_rows_that_have_failed_are_counted(tmp_path):
    path = write(tmp_path, "time_s,isl,osl\n0,9,5\n0.2,8,0\n0.5,7,3\n")
    source = AnyTrace(path=path).source(seed=0, max_model_len=100)
    assert source.notes.skipped == {"failed: no output tokens": 1}


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("ts,isl,osl\n0,9,5\n", {}, r"time_unit=null: must be s, ms, us, ns or date, as neither .* ts"),
        (
            "time_s,tokens\n0,9\n",
            {},
            r"for the prompt tokens or the output tokens; set workload.columns.prompt",
        ),
        ("time_s,isl,osl\n0,9,5\n", {"columns": {"prompt": "isI"}}, r"columns.prompt=isI: .*nearest: isl"),
        ("time_s,isl,osl\n0,9,5\n", {"columns": {"length": "isl"}}, r"columns.length: no such column"),
        (
            "t,isl,osl\n0,9,5\n",
            {"columns": {"arrival": "t", "prompt": "t"}},
            r"must be a column that no other",
        ),
        ("time_s;isl;osl\n0;9;5\n", {}, r"no column has a known name for the arrival time"),
        ("", {}, r"no column has a known name .*found an empty file"),
        ("time_s,isl,osl\nabc,9,5\n", {"time_unit": "s"}, r"2:1: time_s: expected a number of seconds >= 0"),
        ("time_s,isl,osl\n0,-9,5\n", {}, r"2:3: isl: expected"),
        ("time_s,isl,osl\n", {}, r"expected at least one request"),
        ("date,isl,osl\n2025-13-01 00:00:00,1,1\n", {}, r"date: expected a time such as"),
    ],
)
def test_what_a_file_does_not_say_is_asked(tmp_path, text, settings, message):
    with pytest.raises(ValueError, match=message):
        read(AnyTrace(path=write(tmp_path, text), **settings))


@pytest.mark.parametrize(
    ("row", "workload"),
    [
        ({"session_id": "a", "input_length": 3, "output_length": 4, "delay": 5}, "mooncake_sessions"),
        ({"id": "a", "conversations": []}, "sharegpt_json"),
        ({"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": []}, "weka_jsonl"),
    ],
)
def test_files_without_times_of_requests_name_their_workload(tmp_path, row, workload):
    with pytest.raises(ValueError, match=f"workload={workload} reads such files"):
        AnyTrace(path=lines(tmp_path, row))


def test_no_name_has_two_meanings():
    known = [name for names in NAMES.values() for name in names.split()]
    assert len(known) == len(set(known))


@pytest.mark.parametrize("zone", ["Z", "+00:00", "+0200", "-05:30"])
def test_dates_may_have_a_zone(tmp_path, zone):
    text = f"date,isl,osl\n2025-01-01T00:00:00{zone},9,5\n2025-01-01T00:00:00.5{zone},7,3\n"
    assert read(AnyTrace(path=write(tmp_path, text)))[0] == REQUESTS


def test_dates_of_several_zones_are_compared(tmp_path):
    text = "date,isl,osl\n2025-01-01T01:00:00+01:00,9,5\n2025-01-01T00:00:00.5Z,7,3\n"
    assert read(AnyTrace(path=write(tmp_path, text)))[0] == REQUESTS
