"""Traces that are damaged or made to hurt: each is read, or refused in one sentence that names the file."""

import gzip
import json
import math
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.core.request import Prompt, Request, Segment
from sim.workload.arrivals import Constant
from sim.workload.chunks import chunks_of
from sim.workload.formats import (
    AzureCsv,
    BasetenParquet,
    BurstGptCsv,
    ChutesParquet,
    MooncakeJsonl,
    PlainCsv,
    TraceLabJsonl,
)
from sim.workload.recording import Recording, TrafficLog
from sim.workload.token_ids import TokenIdsJsonl
from sim.workload.untimed_traces import WekaJsonl


def csv(header, row):
    return "\n".join([header, *(row.format(i, i + 1) for i in range(6))]) + "\n"


def lines(row):
    return "".join(json.dumps(row) + "\n" for _ in range(4))


CALL = {"t": 1.5, "type": "s", "in": 40, "out": 3, "hash_ids": [1, 2]}
SESSION = {
    "id": "a",
    "block_size": 16,
    "hash_id_scope": "global",
    "requests": [CALL, {"t": 4, "type": "subagent", "requests": [CALL]}],
}
ROUND = {
    "session_id": "a",
    "input_tokens_total": 100,
    "prefix_tokens": 50,
    "output_tokens": 3,
    "timing_events": [{"event_type": "text", "timestamp": "2026-01-31T12:00:00.5Z"}],
}
HASHES = {"timestamp": 100, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
IDS = {"arrival_s": 0.5, "prompt_token_ids": [1, 2], "output_token_ids": [1]}
AZURE = csv("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:0{}:03.9799600,{},5")
TEXTS = {
    "azure.csv": (AzureCsv, AZURE),
    "burst.csv": (BurstGptCsv, csv("Timestamp,Request tokens,Response tokens", "{},{},1")),
    "plain.csv": (PlainCsv, csv("arrival_s,prompt_tokens,output_tokens", "170000000{}.25,{},5")),
    "mooncake.jsonl": (MooncakeJsonl, lines(HASHES)),
    "ids.jsonl": (TokenIdsJsonl, lines(IDS)),
    "weka.jsonl": (lambda path: WekaJsonl(path=path, arrivals=Constant(rate_per_s=1.0)), lines(SESSION)),
    "tracelab.jsonl": (TraceLabJsonl, lines(ROUND)),
}


def recorded(num_rows):
    log = TrafficLog()
    for i in range(num_rows):
        request = Request(i, float(i), Prompt(40, (Segment(7, 16),)), tenant="a", adapter="sql", model="m")
        log.add(request, 4, float(i))
    return pa.Table.from_pandas(log.table({"sql": 8}))


TABLES = {
    "baseten.parquet": (
        BasetenParquet,
        pa.table(
            {
                "timestamp_start_unix_ms": [1_760_000_000_000 + i for i in range(6)],
                "input_tokens": [40] * 6,
                "output_tokens": [5] * 6,
                "total_hashes": [[1, 2, 3]] * 6,
                "org_id": ["x"] * 6,
                "block_size": [16] * 6,
                "request_canceled": [False] * 6,
            }
        ),
    ),
    "chutes.parquet": (
        ChutesParquet,
        pa.table(
            {
                "started_at": pa.array(range(6), pa.timestamp("ms")),
                "it": [40] * 6,
                "ot": [5] * 6,
                "user_id": ["x"] * 6,
            }
        ),
    ),
    "recording.parquet": (Recording, recorded(6)),
}


def read_or_refused(make, path):
    """Reads a trace; returns the sentence with which it is refused, else an empty text."""
    try:
        source = make(path=path).source(seed=0, max_model_len=1000)
        sent = [arrival for chunk in chunks_of(source) for arrival in chunk.arrivals()]
    except ValueError as error:
        message = str(error)
        assert message.isprintable(), message
        assert path.name in message
        assert len(message) < 800 + len(str(path)), message
        return message
    assert len(sent) == source.num_requests > 0
    for request, num_output_tokens, *_ in sent:
        assert math.isfinite(request.arrival_s)
        assert min(num_output_tokens, request.prompt.num_tokens) >= 1
        assert all(type(one.content_id) is int and one.num_tokens >= 1 for one in request.prompt.segments)
        request.tenant.encode()
    return ""


ODD = [
    "NaN",
    "-Infinity",
    "1e400",
    "-1",
    "9" * 40,
    "9" * 5000,
    "1.5",
    "null",
    '"x"',
    "[]",
    "{}",
    "1_0",
    "1 5",
]
ODD += ['"\\ud800"', '"\\u0000"', "\x1b[31m", "9223372036854775808", "", "x" * 3000, "true", "[[1]]"]
AT = st.integers(0, 10**6)


def replaced(data, at, text):
    """Replaces a number or a text of the file by another value."""
    found = list(re.finditer(rb"\d+(\.\d+)?|\"[a-z]+\"", data))
    if not found:
        return data
    one = found[at % len(found)]
    return data[: one.start()] + text.encode() + data[one.end() :]


def doubled(data, at):
    """Repeats the values of a line in it, with their keys if it has any."""
    rows = data.split(b"\n")
    row = rows[at % len(rows)]
    rows[at % len(rows)] = row[:-1] + b", " + row[1:] if row.startswith(b"{") else row + b"," + row
    return b"\n".join(rows)


def inserted(data, at, one):
    return data[: at % (len(data) + 1)] + one + data[at % (len(data) + 1) :]


CHANGES = st.one_of(
    st.tuples(st.just(replaced), AT, st.sampled_from(ODD)),
    st.tuples(st.just(inserted), AT, st.binary(min_size=1, max_size=2) | st.just(b"\0")),
    st.tuples(st.just(lambda data, at: data[: at % (len(data) + 1)]), AT),
    st.tuples(st.just(doubled), AT),
    st.tuples(
        st.just(lambda data, end: data.replace(b"\n", end)), st.sampled_from([b"\r\n", b"\r", b"\n\n"])
    ),
    st.tuples(
        st.just(lambda data, mark: mark + data), st.sampled_from([b"\xef\xbb\xbf", b"\xff\xfe", b'"', b"\0"])
    ),
    st.tuples(
        st.just(lambda data, code: data.decode(errors="replace").encode(code, "replace")),
        st.sampled_from(["utf-16", "utf-32", "utf-7", "cp500"]),
    ),
)
PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("name", TEXTS)
@given(
    changes=st.lists(CHANGES, max_size=3),
    suffix=st.sampled_from(list(PACKERS)),
    cut=st.none() | AT,
    more=st.sampled_from([b"", b"", b"junk"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_text_is_read_or_refused_in_one_sentence(tmp_path, name, changes, suffix, cut, more):
    make, text = TEXTS[name]
    data = text.encode()
    for change, *arguments in changes:
        data = change(data, *arguments)
    packed = PACKERS[suffix](data) + more
    path = tmp_path / (name + suffix)
    path.write_bytes(packed if cut is None else packed[: cut % (len(packed) + 1)])
    read_or_refused(make, path)


NUM = 6
COLUMNS = [
    pa.array([None] * NUM),
    pa.array([math.nan] * NUM),
    pa.array([1e300] * NUM),
    pa.array(["x"] * NUM),
    pa.array([[None, 1]] * NUM),
    pa.array([[1.5]] * NUM),
    pa.array([[(1 << 64) - 1]] * NUM, pa.list_(pa.uint64())),
    pa.array([(1 << 64) - 1] * NUM, pa.uint64()),
    pa.array([True] * NUM),
    pa.array([b"\xff"] * NUM),
    pa.array([b"x", *[b"\xff"] * 5]).view(pa.utf8()),
    pa.array(["\x1b[31m\n"] * NUM),
    pa.array([{"a": 1}] * NUM),
    pa.array([-1] * NUM),
    pa.array([1 << 62] * NUM, pa.timestamp("ms")),
    pa.array([1] * NUM, pa.date64()),
    pa.array([5] * NUM).dictionary_encode(),
    pa.array([2.0] * NUM, pa.float16()),
    pa.array([[["a"]]] * NUM),
    pa.array([[1]] * NUM, pa.large_list(pa.int64())),
]


@pytest.mark.parametrize("name", TABLES)
@given(
    at=AT,
    column=st.sampled_from(COLUMNS),
    how=st.sampled_from(["other", "twice", "none"]),
    cut=st.none() | AT,
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_table_is_read_or_refused_in_one_sentence(tmp_path, name, at, column, how, cut):
    make, table = TABLES[name]
    field = table.schema.names[at % table.num_columns]
    if how == "other":
        table = table.set_column(at % table.num_columns, field, column)
    elif how == "twice":
        table = table.append_column(field, table.column(field))
    else:
        table = table.drop_columns([field])
    path = tmp_path / name
    pq.write_table(table, path)
    whole = path.read_bytes()
    path.write_bytes(whole if cut is None else whole[: cut % (len(whole) + 1)])
    message = read_or_refused(make, path)
    if cut is None and how == "twice":
        assert f"column {field}" in message or f"columns {field}" in message


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("plain.csv", ",2,", "," + "9" * 3000 + ",", r"plain.csv:3:15: prompt_tokens: .*, found '9{80}'$"),
        (
            "plain.csv",
            "prompt_tokens",
            "\x1b[31m\0",
            r"plain.csv:1:1: .*, found arrival_s,\\x1b\[31m\\x00,output",
        ),
        ("mooncake.jsonl", "600", '"\\ud800\\u0000"', r"input_length: expected .*, found \\ud800\\x00$"),
        ("weka.jsonl", '"s"', '"\\u001b[2J"', r"type: expected n, s, or subagent, found \\x1b\[2J$"),
        ("ids.jsonl", "arrival_s", "\\u001b" * 999, r"no key arrival_s; .*, found (\\x1b){50}$"),
    ],
)
def test_messages_show_the_beginning_of_a_value_without_control_characters(tmp_path, name, old, new, message):
    make, text = TEXTS[name]
    path = tmp_path / name
    path.write_text(text.replace(old, new))
    assert re.search(message, read_or_refused(make, path))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            pa.array([b"x", *[b"\xff"] * 5]).view(pa.utf8()),
            "2:org_id: .*, found 'utf-8' codec can't decode byte 0xff",
        ),
        (pa.array([1 << 62] * NUM, pa.timestamp("ms")), "1:org_id: .*, found Python int too large"),
    ],
)
def test_a_value_of_a_table_that_cannot_be_read_is_named_with_its_row(tmp_path, column, message):
    make, table = TABLES["baseten.parquet"]
    path = tmp_path / "t.parquet"
    pq.write_table(table.set_column(4, "org_id", column), path)
    found = read_or_refused(make, path)
    assert re.search(f"t.parquet:{message}", found), found
