"""Blocks that are read as columns are those that are read row by row, for right and for wrong values."""

import gzip
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.workload import trace_files, trace_tables
from sim.workload.formats import (
    AzureCsv,
    BasetenParquet,
    BurstGptCsv,
    ChutesParquet,
    MooncakeJsonl,
    PlainCsv,
)
from sim.workload.trace_files import UnusualTextError
from sim.workload.trace_reading import Reading
from sim.workload.trace_rows import joined

UNIX = 1_700_000_000
PLAIN = "arrival_s,prompt_tokens,output_tokens"


def rows_or_error(trace):
    """Returns the rows of a trace and its remarks, up to the error and with it."""
    blocks, error = [], ""
    try:
        blocks.extend(trace.blocks())
    except ValueError as found:
        error = str(found)
    if not blocks:
        return [], error
    one, num = joined(blocks), sum(map(len, blocks))
    columns = [one.line, one.arrival_s, one.prompt_tokens, one.output_tokens]
    left_out = ~one.is_replayed()
    for lengths in columns[2:]:
        lengths[left_out] = 0  # not checked, as the contents
    if one.content_ids is not None:
        one.content_ids[left_out] = None
    columns += [one.skip_reason, one.tenant, one.content_ids]
    listed = [[None] * num if c is None else [v or None for v in c.tolist()] for c in columns]
    return [*zip(*listed, strict=True), [b.remarks for b in blocks if b.remarks]], error


def refuse(*_):
    raise UnusualTextError


def both_ways(trace):
    """Returns what is read as columns, and row by row."""
    columns = rows_or_error(trace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reading, "block", refuse)
        return columns, rows_or_error(trace)


def is_read_as_columns(trace):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reading, "row", lambda *_: pytest.fail("is read row by row"))
        return sum(map(len, trace.blocks()))


ODD = st.sampled_from(
    ["", " 5", "5 ", "+5", "1_0", "0x10", "5.0", "1e3", "nan", "inf", "-1", "٣", "x", '"7"', "9" * 25, "007"]
)
TIMES = st.one_of(
    st.integers(0, 50).map(str),
    st.floats(0, 50).map(repr),
    st.decimals(0, 50, places=6).map(str),
)
UNIX_TIMES = st.one_of(
    st.integers(UNIX - 5, UNIX + 50).map(str),
    st.decimals(UNIX, UNIX + 50, places=6).map(str),
    st.decimals(UNIX, UNIX + 50, places=11).map(str),
    st.integers(UNIX * 10**9, UNIX * 10**9 + 50).map(str),
)
COUNTS = st.integers(0, 30).map(str)
ENDS = st.sampled_from(["\n", "\n", "\n", "\r\n", "\n\n", "\r", ""])


@given(
    rows=st.lists(st.tuples(TIMES, COUNTS, COUNTS), min_size=1, max_size=12)
    | st.lists(st.tuples(UNIX_TIMES, COUNTS, COUNTS), min_size=1, max_size=12),
    odd=st.none() | st.tuples(st.integers(0, 11), st.integers(0, 2), ODD),
    end=ENDS,
    piece=st.integers(1, 60),
    start_s=st.sampled_from([0.0, 2e9]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_csv_columns_are_its_rows(tmp_path_factory, rows, odd, end, piece, start_s):
    if odd is not None:
        row, column, text = odd
        changed = list(rows[row % len(rows)])
        changed[column] = text
        rows[row % len(rows)] = tuple(changed)
    path = tmp_path_factory.mktemp("trace") / "t.csv"
    text = "\n".join([",".join(row) for row in rows]) + end
    path.write_bytes(("Timestamp,Request tokens,Response tokens\n" + text).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_files, "PIECE", piece)
        columns, one_by_one = both_ways(BurstGptCsv(path=path, start_s=start_s))
    assert columns == one_by_one


def test_of_a_repeated_key_the_last_value_counts(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 7, "timestamp": 5000, "input_length": 600, "input_length": 9, "output_length": 3, '
        '"hash_ids": [1, 2], "hash_ids": [7]}\n'
    )
    columns, one_by_one = both_ways(MooncakeJsonl(path=path))
    assert columns == one_by_one
    assert columns[0][0][:4] == (1, 5.0, 9, 3)
    assert columns[0][0][-1] == (512, 7)  # tokens of a block, ids


DATES = st.one_of(
    st.builds(
        "2023-11-{:02} {:02}:{:02}:{:02}{}{}".format,
        st.integers(1, 30),
        st.integers(0, 23),
        st.integers(0, 59),
        st.integers(0, 61),
        st.sampled_from(["", ".5", ".9799601", ".123456789"]),
        st.sampled_from(["", "+00:00"]),
    ),
    st.sampled_from(["2023-11-31 00:00:00", "16.11.2023 18:15", "2023-11-16 18:15", "2023-11-16 18:15: 3"]),
)


@given(dates=st.lists(DATES, min_size=1, max_size=8), piece=st.integers(1, 99))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_columns_of_dates_are_those_of_the_rows(tmp_path_factory, dates, piece):
    path = tmp_path_factory.mktemp("trace") / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{d},3,4\n" for d in dates))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_files, "PIECE", piece)
        columns, one_by_one = both_ways(AzureCsv(path=path))
    assert columns == one_by_one


COUNTED = st.integers(1, 2000) | st.integers(-2, 2) | st.floats(0, 9)
VALUES = COUNTED | st.booleans() | st.none() | st.just(10**20) | st.just("5")
BROKEN = ["\n", "[1]\n", "{}\n", " {}", '{"a": 1}{"b": 2}\n', "\r\n", '{"a":\n1}\n']
JSON_ROWS = st.fixed_dictionaries(
    {
        "timestamp": st.integers(0, 9000) | st.floats(0, 9000),
        "input_length": st.integers(1, 2000),
        "output_length": st.integers(1, 20),
        "hash_ids": st.lists(st.integers(0, 9), max_size=2),
    }
)
UNIX_ROWS = JSON_ROWS.map(lambda row: row | {"timestamp": UNIX * 1000 + int(row["timestamp"])})


@given(
    rows=st.lists(JSON_ROWS, min_size=1, max_size=8) | st.lists(UNIX_ROWS, min_size=1, max_size=8),
    odd=st.none()
    | st.tuples(
        st.integers(0, 7),
        st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids", "other"]),
        VALUES | st.lists(VALUES, max_size=2),
    ),
    broken=st.none() | st.sampled_from(BROKEN),
    piece=st.integers(1, 300),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_json_columns_are_its_rows(tmp_path_factory, rows, odd, broken, piece):
    if odd is not None:
        row, key, value = odd
        rows[row % len(rows)] = rows[row % len(rows)] | {key: value}
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + (broken or ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_files, "PIECE", piece)
        columns, one_by_one = both_ways(MooncakeJsonl(path=path))
    assert columns == one_by_one


def column_of(*kinds):
    """Draws a column of 5 values of one kind; Parquet columns have a type."""
    return st.one_of(*(st.lists(kind, min_size=5, max_size=5) for kind in kinds))


OPTIONAL = st.none() | st.integers(0, 40)


UNIX_MS = st.integers(UNIX * 1000, UNIX * 1000 + 99)
HASHES = column_of(
    st.lists(st.integers(0, 9), max_size=1),
    st.none() | st.lists(st.integers(-1, 9), max_size=3),
    st.lists(st.integers(2**63 - 1, 2**64 - 1), max_size=1),
)


@given(
    time=column_of(UNIX_MS, st.integers(-1, 50), st.floats(0, 50), OPTIONAL),
    inputs=column_of(
        st.integers(1, 40), OPTIONAL, st.floats(0, 40), st.integers(-1, 1), st.sampled_from(["5", "x"])
    ),
    outputs=column_of(st.integers(1, 40), OPTIONAL),
    hashes=st.none() | HASHES,
    canceled=st.none()
    | column_of(st.booleans(), st.none() | st.integers(0, 2), st.sampled_from(["", "true", "yes"])),
    org=st.none() | column_of(st.none() | st.sampled_from(["a", "b"]), st.integers(0, 3), st.floats(0, 3)),
    block=st.none() | column_of(st.just(16), st.none() | st.sampled_from([16, 32])),
)
def test_parquet_columns_are_its_rows(tmp_path_factory, time, inputs, outputs, hashes, canceled, org, block):
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    optional = {"total_hashes": hashes, "request_canceled": canceled, "org_id": org, "block_size": block}
    columns = {"timestamp_start_unix_ms": time, "input_tokens": inputs, "output_tokens": outputs}
    columns |= {name: column for name, column in optional.items() if column is not None}
    is_large = max((one for ids in hashes or () for one in ids or ()), default=0) >= 2**63
    types = {"total_hashes": pa.list_(pa.uint64() if is_large else pa.int64())}
    typed = {name: pa.array(column, types.get(name)) for name, column in columns.items()}
    pq.write_table(pa.table(typed), path, row_group_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_tables, "ROWS_AT_ONCE", 3)
        columns, one_by_one = both_ways(BasetenParquet(path=path))
    assert columns == one_by_one


def plain_rows(num=20_000):
    return "".join(f"{i / 8},{i % 97 + 1},{i * i % 89 + 1}\n" for i in range(num))


@pytest.mark.parametrize(
    ("name", "compress"),
    [("t.csv", bytes), ("t.csv.gz", gzip.compress), ("t.csv.zst", zstandard.ZstdCompressor().compress)],
)
def test_plain_files_are_read_as_columns(tmp_path, name, compress):
    path = tmp_path / name
    text = f"{PLAIN}\n{plain_rows()}"
    for written in (text, text.replace("\n", "\r\n"), "\ufeff" + text.rstrip()):
        path.write_bytes(compress(written.encode()))
        assert is_read_as_columns(PlainCsv(path=path)) == 20_000


@pytest.mark.parametrize("scale", [1, 1000, 10**6, 10**9])
def test_unix_times_are_read_as_columns(tmp_path, scale):
    path = tmp_path / "t.csv"
    path.write_text(f"{PLAIN}\n" + "".join(f"{UNIX * scale + i},{i + 1},1\n" for i in range(99)))
    assert is_read_as_columns(PlainCsv(path=path)) == 99
    path.write_text(f"{PLAIN}\n" + "".join(f"{UNIX + i}.{i:06},{i + 1},1\n" for i in range(99)))
    assert is_read_as_columns(PlainCsv(path=path)) == 99


def test_json_lines_and_parquet_are_read_as_columns(tmp_path):
    row = {"timestamp": 5, "type": "text", "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row | {"timestamp": i}) + "\n" for i in range(5000)))
    assert is_read_as_columns(MooncakeJsonl(path=path)) == 5000
    path = tmp_path / "t.parquet"
    users = [f"u{i}" if i % 5 else None for i in range(5000)]
    tokens = pd.array([i % 90 + 1 if i % 7 else None for i in range(5000)], "Int64")
    times = pd.to_datetime("2026-03-01") + pd.to_timedelta(np.arange(5000), "s")
    pd.DataFrame({"started_at": times, "it": tokens, "ot": tokens, "user_id": users}).to_parquet(path)
    assert is_read_as_columns(ChutesParquet(path=path)) == 5000


def test_a_damaged_file_keeps_its_line(tmp_path):
    whole = gzip.compress(f"{PLAIN}\n{plain_rows()}".encode())
    path = tmp_path / "t.csv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    lines, error = rows_or_error(PlainCsv(path=path))
    assert error.startswith(f"{path}:{len(lines) + 1}:1: expected more compressed data")
    assert len(lines) > 1000
