"""Measurements by other tools that cannot be right: clocks that go backwards, columns, values."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from experiments.validate.foreign.read import read_runs
from sim.settings.errors import ConfigError
from tests.experiments.validate.foreign_files import RUN, aiperf, bench, csv_text, lines, write


def refused(file: Path) -> str:
    with pytest.raises(ConfigError) as error:
        read_runs(file)
    assert str(error.value).startswith(f"against={file}: ")
    return str(error.value).removeprefix(f"against={file}: ")


def test_a_clock_that_goes_backwards_is_named_by_its_row(tmp_path):
    table = pd.read_csv(write(tmp_path, "a.csv"))
    table.loc[1, "last_token_s"] = 100.9
    table.to_csv(tmp_path / "a.csv", index=False)
    assert refused(tmp_path / "a.csv") == (
        "row 2: the clock goes backwards: last_token_s=100.900000 is before first_token_s=101.000000"
    )
    found = bench()
    found["itls"][2] = [0.1, -5.0]
    (tmp_path / "b.json").write_text(json.dumps(found))
    assert refused(tmp_path / "b.json").startswith("row 3: itls[2][1]=-5.0: must be a finite number")
    (tmp_path / "c.jsonl").write_text(lines([aiperf(RUN[0]), aiperf((100.0, 99.0, 101.0, 4, 4))]))
    assert refused(tmp_path / "c.jsonl").startswith("row 2: time_to_first_token=-1000.0: must be")


def test_rounding_is_no_clock_that_goes_backwards(tmp_path):
    table = pd.read_csv(write(tmp_path, "a.csv"))
    table.loc[1, "last_token_s"] = 101.0 - 1e-6
    table.to_csv(tmp_path / "a.csv", index=False)
    assert read_runs(tmp_path / "a.csv")


def test_a_log_and_iterations_with_such_a_clock(tmp_path):
    write(tmp_path, "requests.csv")
    log = {"t": [2.0, 1.0], "running": [2, 1], "waiting": [0, 0], "kv_cache_pct": [50.0, 25.0]}
    pd.DataFrame(log).to_csv(tmp_path / "timeseries.csv", index=False)
    assert refused(tmp_path / "requests.csv").startswith(
        "timeseries.csv, row 2: the clock goes backwards: t=1.0"
    )
    write(tmp_path, "requests.parquet")
    pd.DataFrame({"replica": 0, "start_s": [0.0, 2.0, 1.0], "duration_s": 0.5}).to_parquet(
        tmp_path / "iterations.parquet"
    )
    assert "iterations.parquet, replica 0, row 3: the clock" in refused(tmp_path / "requests.parquet")


def test_missing_columns_are_named_with_the_known_formats(tmp_path):
    pd.read_csv(write(tmp_path, "a.csv")).drop(columns=["first_token_s", "input_tokens"]).to_csv(
        tmp_path / "a.csv", index=False
    )
    message = refused(tmp_path / "a.csv")
    assert message.startswith("missing column input_tokens, first_token_s; found arrival_s, last_token_s")
    for known in ("CSV", "requests.parquet", "vllm bench serve --save-detailed", "profile_export.jsonl"):
        assert known in message


def test_results_without_details_say_how_to_get_them(tmp_path):
    found = {key: value for key, value in bench().items() if not isinstance(value, list)}
    (tmp_path / "a.json").write_text(json.dumps(found))
    assert "vllm bench serve writes them with --save-detailed" in refused(tmp_path / "a.json")
    record = aiperf(RUN[0])
    del record["metrics"]["time_to_first_token"]
    (tmp_path / "a.jsonl").write_text(lines([record]))
    assert "row 1: time_to_first_token missing; run aiperf with --streaming" in refused(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("arrival_s", "noon", "row 2: arrival_s=noon: must be a number"),
        ("arrival_s", "", "row 2: arrival_s=empty: must be a number"),
        ("input_tokens", "0", "row 2: input_tokens=0: must be a whole number >= 1, at most 1,000,000,000"),
        (
            "output_tokens",
            "2.5",
            "row 2: output_tokens=2.5: must be a whole number >= 0, at most 1,000,000,000",
        ),
        ("last_token_s", "inf", "row 2: last_token_s=inf: must be a number"),
    ],
)
def test_values_that_cannot_be_right(tmp_path, column, value, message):
    table = pd.read_csv(write(tmp_path, "a.csv"), dtype=str)
    table.loc[1, column] = value
    table.to_csv(tmp_path / "a.csv", index=False)
    assert refused(tmp_path / "a.csv") == message


def test_no_answers_at_all(tmp_path):
    (tmp_path / "a.csv").write_text(csv_text(status="failed"))
    assert refused(tmp_path / "a.csv") == "no request finished, so there is nothing to compare"
    (tmp_path / "b.csv").write_text(csv_text().splitlines()[0] + "\n")
    assert refused(tmp_path / "b.csv") == "the file has no complete row"


def test_no_such_file(tmp_path):
    write(tmp_path, "requests.csv")
    assert "no such file; nearest: requests.csv" in refused(tmp_path / "request.csv")
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").startswith(
        "the folder has none of requests.parquet, profile_export.jsonl"
    )
