"""Baseten's and Chutes's traces in Parquet: files made to the formats, and every bad value."""

import numpy as np
import pandas as pd
import pytest

from policies.core.request import Segment
from sim.workload import trace_tables
from sim.workload.formats import BasetenParquet, ChutesParquet

BASETEN = {
    "timestamp_start_unix_ms": [1_760_000_000_000, 1_760_000_001_500, 1_760_000_002_000],
    "prompt": ["", "", ""],
    "input_tokens": [40, 32, 9],
    "output_tokens": [5, 6, 7],
    "total_hashes": [[1, 2, 3], [1, 2], None],
    "org_id": ["x", "y", "x"],
}
CHUTES = {
    "started_at": pd.to_datetime(
        ["2026-03-01 00:00:00.00", "2026-03-01 00:00:00.25", "2026-03-01 00:01:00.00"]
    ),
    "it": [100.0, 200.0, None],
    "ot": [10.0, 20.0, None],
    "user_id": ["u1", "u2", "u1"],
}


def write(folder, columns, **changed):
    path = folder / "trace.parquet"
    table = pd.DataFrame(columns | changed)
    for name in ("it", "ot"):
        if name in table:
            table[name] = table[name].astype("Int64")
    table.to_parquet(path)
    return path


def source_of(workload):
    return workload.source(seed=0, max_model_len=10_000)


def test_reads_baseten_with_the_contents_of_prompts(tmp_path):
    source = source_of(BasetenParquet(path=write(tmp_path, BASETEN)))
    sent = list(source.arrivals())
    assert [a.at_s for a in sent] == [0.0, 1.5, 2.0]
    assert [(a.request.prompt.num_tokens, a.num_output_tokens) for a in sent] == [(40, 5), (32, 6), (9, 7)]
    assert [a.request.tenant for a in sent] == ["x", "y", "x"]
    assert sent[0].request.prompt.segments == (Segment(1, 16), Segment(2, 16), Segment(3, 8))
    assert sent[1].request.prompt.segments == (Segment(1, 16), Segment(2, 16))
    assert sent[2].request.prompt.segments == ()
    assert "Unix times in milliseconds" in source.notes.remarks[0]


def test_rows_with_long_lists_are_read_few_at_a_time(tmp_path, monkeypatch):
    """Rows have one hash in the first row group, 40 in the second: at most 20 rows or some 300 numbers."""
    path = tmp_path / "t.parquet"
    columns = {name: BASETEN[name][:1] * 60 for name in ("timestamp_start_unix_ms", "output_tokens")}
    table = pd.DataFrame(columns | {"input_tokens": 640, "total_hashes": [[1]] * 30 + [[*range(40)]] * 30})
    table.to_parquet(path, row_group_size=30)
    whole = list(source_of(BasetenParquet(path=path)).arrivals())
    monkeypatch.setattr(trace_tables, "MAX_VALUES", 300)
    monkeypatch.setattr(trace_tables, "LISTS_AT_ONCE", 3)
    monkeypatch.setattr(trace_tables, "ROWS_AT_ONCE", 20)
    num_rows = [len(block) for block in BasetenParquet(path=path).blocks()]
    assert (num_rows[0], num_rows[-2]) == (20, 9)
    assert sum(num_rows) == 60
    assert list(source_of(BasetenParquet(path=path)).arrivals()) == whole
    assert len(whole) == 60


def test_canceled_requests_are_counted_and_not_replayed(tmp_path):
    path = write(tmp_path, BASETEN, request_canceled=[0, 1, None], output_tokens=[5, 0, 0])
    source = source_of(BasetenParquet(path=path))
    assert len(list(source.arrivals())) == 1
    assert source.notes.skipped == {"canceled": 1, "no input or no output tokens": 1}


@pytest.mark.parametrize(
    "canceled", [["false", "TRUE", None], [False, True, None], ["0", "1", ""], [0.0, 1.0, float("nan")]]
)
def test_canceled_is_read_from_text_numbers_and_truth_values(tmp_path, canceled):
    source = source_of(BasetenParquet(path=write(tmp_path, BASETEN, request_canceled=canceled)))
    assert [a.at_s for a in source.arrivals()] == [0.0, 2.0]
    assert source.notes.skipped == {"canceled": 1}


def test_reads_chutes_with_users_as_tenants(tmp_path):
    source = source_of(ChutesParquet(path=write(tmp_path, CHUTES)))
    sent = list(source.arrivals())
    assert [(a.at_s, a.request.prompt.num_tokens, a.num_output_tokens) for a in sent] == [
        (0, 100, 10),
        (0.25, 200, 20),
    ]
    assert [a.request.tenant for a in sent] == ["u1", "u2"]
    assert source.notes.skipped == {"no token counts": 1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"timestamp_start_unix_ms": [-1, 2, 3]},
            r"trace.parquet:1:timestamp_start_unix_ms: expected a time",
        ),
        (
            {"request_canceled": ["false", "perhaps", "no"]},
            r"trace.parquet:2:request_canceled: expected true or false, found perhaps",
        ),
        ({"input_tokens": [40, -1, 9]}, r"trace.parquet:2:input_tokens: expected a whole number of tokens"),
        ({"output_tokens": ["5", "6", "x"]}, r"trace.parquet:1:output_tokens: expected a whole number"),
        (
            {"total_hashes": [[1], [1, 2, 3], []]},
            r"trace.parquet:2:total_hashes: expected at most 2 ids for 32 tokens, 16 each",
        ),
        ({"total_hashes": [1, 2, 3]}, r"trace.parquet:1:total_hashes: expected a list .* found 1"),
        ({"block_size": [16, 16, 64]}, r"trace.parquet:3:block_size: .*set workload.tokens_per_hash=64"),
    ],
)
def test_a_bad_value_is_named_with_file_row_and_column(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        source_of(BasetenParquet(path=write(tmp_path, BASETEN, **changed)))


def test_a_missing_column_and_a_file_of_another_kind_are_named(tmp_path):
    path = write(tmp_path, CHUTES)
    with pytest.raises(ValueError, match=r"no column timestamp_start_unix_ms; expected .* found started_at"):
        source_of(BasetenParquet(path=path))
    path.write_text("started_at,it,ot\n")
    with pytest.raises(ValueError, match=r"trace.parquet: cannot be read as Parquet"):
        source_of(ChutesParquet(path=path))


@pytest.mark.parametrize("times", ["dates", "milliseconds", "numbers"])
@pytest.mark.parametrize("start_s", [0.5, 30.0, 57.0, 99.0])
def test_row_groups_before_the_window_are_not_read(tmp_path, times, start_s):
    """Ten row groups of ten rows, one request each second: the unread groups have no valid lengths."""
    at_s = np.arange(100)
    started = {
        "dates": pd.to_datetime("2026-03-01") + pd.to_timedelta(at_s, "s"),
        "milliseconds": 1_760_000_000_000 + at_s * 1000,
        "numbers": at_s + 0.25,
    }[times]
    first_s = 0.25 if times == "numbers" else 0.0
    path = tmp_path / "trace.parquet"
    tokens = np.where(at_s < start_s // 10 * 10, -1, at_s + 1)
    table = {"started_at": started, "it": tokens, "ot": 1, "user_id": [f"u{i}" for i in at_s]}
    pd.DataFrame(table).to_parquet(path, row_group_size=10)
    source = source_of(ChutesParquet(path=path, start_s=start_s))
    inside = [i for i in at_s.tolist() if i + first_s >= start_s]
    assert [(a.at_s, a.request.prompt.num_tokens, a.request.tenant) for a in source.arrivals()] == [
        (i + first_s - start_s, i + 1, f"u{i}") for i in inside
    ]
    assert any("Unix times" in remark for remark in source.notes.remarks) == (times != "numbers")
    if start_s > 10:
        with pytest.raises(ValueError, match=r"trace.parquet:1:it: expected a whole number"):
            source_of(ChutesParquet(path=path, start_s=start_s, sort=True))


def test_without_statistics_all_rows_are_read(tmp_path):
    path = tmp_path / "trace.parquet"
    table = {"started_at": np.arange(100), "it": np.arange(100) + 1, "ot": 1}
    pd.DataFrame(table).to_parquet(path, row_group_size=10, write_statistics=False)
    assert source_of(ChutesParquet(path=path, start_s=57)).num_requests == 43
    with pytest.raises(ValueError, match=r"no request of .* last row that was read arrives at 99 s"):
        source_of(ChutesParquet(path=path, start_s=500))
    pd.DataFrame(table).to_parquet(path, row_group_size=10)
    with pytest.raises(ValueError, match=r"no request of .* last row that was read arrives at 99 s"):
        source_of(ChutesParquet(path=path, start_s=500))
