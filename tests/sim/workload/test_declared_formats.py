"""Formats that a user declares: one declaration reads CSV, JSON lines and Parquet alike."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd
import pytest

from sim.workload.trace_columns import Columns
from sim.workload.trace_files import UnusualTextError
from sim.workload.trace_reading import Reading
from sim.workload.trace_tables import CSV, JSON_LINES, PARQUET
from sim.workload.traces import MILLISECONDS, HashedTrace, Trace

PAGE = Path(__file__).parents[3] / "docs" / "own_trace.md"
ROWS = [
    {"sent": 500, "asked": 20, "answered": 3, "user": "a", "chat": "x", "state": "ok"},
    {"sent": 700, "asked": 30, "answered": 0, "user": "b", "chat": "y", "state": "ok"},
    {"sent": 900, "asked": 40, "answered": 5, "user": "", "chat": "x", "state": "Timeout"},
    {"sent": 1500, "asked": 50, "answered": 7, "user": "b", "chat": "", "state": "OK"},
]
SIMPLE = {"arrival": "sent", "prompt": "asked", "output": "answered", "failed": "no answer"}


def write(folder, table, rows):
    path = folder / "trace"
    if table is PARQUET:
        pd.DataFrame(rows).to_parquet(path)
    elif table is JSON_LINES:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pd.DataFrame(rows).to_csv(path, index=False)
    return path


def declared(table_, base=Trace, times_=MILLISECONDS, **names):
    """Returns a format with columns."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Own(base):
        table = table_
        times = times_
        columns = Columns(**SIMPLE | names)

    return Own


def requests(trace):
    source = trace.source(seed=0, max_model_len=1000)
    found = [
        (
            one.at_s,
            one.request.prompt.num_tokens,
            one.num_output_tokens,
            one.request.tenant,
            one.request.session_id,
        )
        for one in source.arrivals()
    ]
    return found, source.notes.skipped


@pytest.mark.parametrize("table", [CSV, JSON_LINES, PARQUET])
@pytest.mark.parametrize("by_row", [False, True])
def test_one_declaration_reads_all_kinds_of_files(tmp_path, monkeypatch, table, by_row):
    path = write(tmp_path, table, ROWS)
    names = {"tenant": "user"} | ({"session": "chat", "status": "state"} if by_row else {})
    if not by_row:
        monkeypatch.setattr(Reading, "row", lambda *_: pytest.fail("is read row by row"))
    found, skipped = requests(declared(table, **names)(path=path))
    timeout = [] if by_row else [(0.4, 40, 5, "", None)]
    assert found == [(0.0, 20, 3, "a", 0 if by_row else None), *timeout, (1.0, 50, 7, "b", None)]
    assert skipped == {"no answer": 1} | ({"state: Timeout": 1} if by_row else {})


@pytest.mark.parametrize("table", [CSV, JSON_LINES, PARQUET])
def test_the_first_name_that_a_file_has_is_the_column(tmp_path, table):
    path = write(tmp_path, table, ROWS)
    own = declared(table, prompt="input_tokens|asked|answered", tenant="customer|user")
    assert [row[1:4] for row in requests(own(path=path))[0]] == [(20, 3, "a"), (40, 5, ""), (50, 7, "b")]
    with pytest.raises(ValueError, match=r"no (column|key) input_tokens"):
        requests(declared(table, prompt="input_tokens|tokens_in")(path=path))


def refuse(*_):
    raise UnusualTextError


@pytest.mark.parametrize("table", [JSON_LINES, PARQUET])
@pytest.mark.parametrize("by_row", [False, True])
def test_ids_of_contents_are_those_of_their_blocks(tmp_path, monkeypatch, table, by_row):
    if by_row:
        monkeypatch.setattr(Reading, "block", refuse)
    rows = [ROWS[i] | {"blocks": [7, 8, 9 + i], "size": 16, "asked": 33 + i} for i in (0, 2, 3)]
    own = declared(table, HashedTrace, hashes="blocks", hash_tokens="size")
    path = write(tmp_path, table, rows)
    source = own(path=path, tokens_per_hash=16).source(seed=0, max_model_len=1000)
    assert [one.request.prompt.segments[-1] for one in source.arrivals()] == [(9, 1), (11, 3), (12, 4)]
    with pytest.raises(ValueError, match=r"size: expected tokens_per_hash=8, found 16; set workload"):
        requests(own(path=path, tokens_per_hash=8))
    path = write(tmp_path, table, [rows[0] | {"asked": 30}])
    with pytest.raises(ValueError, match=r"blocks: expected at most 2 ids for 30 tokens, 16 each"):
        requests(own(path=path, tokens_per_hash=16))


def test_a_column_without_a_name_has_no_meaning(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(",x,x,sent,asked,answered\n1,0,00,500,20,3\n2,0,00,700,5.0,4\nno,0,00,900,6.5,4\n")
    with pytest.raises(ValueError, match=r"t.csv:4:13: asked: expected a whole number"):
        requests(declared(CSV)(path=path))
    path.write_text(path.read_text().replace("6.5", "6.0"))
    assert [row[1:4] for row in requests(declared(CSV)(path=path))[0]] == [
        (20, 3, ""),
        (5, 4, ""),
        (6, 4, ""),
    ]


@pytest.mark.parametrize("table", [JSON_LINES, PARQUET, CSV])
def test_a_column_that_is_refused_is_named(tmp_path, table):
    own = declared(table, refused={"chat": "no chats; workload=conversation has them"})
    with pytest.raises(ValueError, match=r"chat: expected no chats; workload=conversation .* found '?x"):
        requests(own(path=write(tmp_path, table, ROWS)))


def test_the_page_names_all_that_a_format_can_declare():
    text = PAGE.read_text()
    assert [one.name for one in fields(Columns) if f"`{one.name}`" not in text] == []
