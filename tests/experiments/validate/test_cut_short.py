"""Measurements by other tools that were cut short: what is complete is read."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pandas as pd
import pytest

from experiments.validate.foreign.complete_prefix import read_object
from experiments.validate.foreign.read import read_runs
from sim.report.wording import plural
from sim.settings.errors import ConfigError
from tests.experiments.validate.foreign_files import LATENCIES, RUN, aiperf, bench, csv_text, lines, write


def test_a_csv_gives_its_complete_rows_wherever_it_is_cut(tmp_path):
    text, file = csv_text(), tmp_path / "cut.csv"
    first_row = text.index("\n", text.index("\n") + 1) + 1
    for end in range(first_row, len(text)):
        file.write_text(text[:end])
        (run,) = read_runs(file).values()
        complete = text[:end].count("\n") - 1
        assert len(run.requests) == complete
        assert run.latencies["e2e_s"].tolist() == LATENCIES["e2e_s"][:complete]
        is_cut = not text[:end].endswith("\n")
        assert (
            f"The file is truncated; only its {plural(complete, 'complete row')} can be used." in run.notes
        ) == is_cut


def test_a_csv_that_was_cut_while_compressed(tmp_path):
    many = pd.concat([pd.read_csv(write(tmp_path, "one.csv"))] * 2000)
    rng = np.random.default_rng(0)  # noise, so that it does not compress to nothing
    many["first_token_s"] += rng.random(len(many)) * 1e-3
    many["last_token_s"] += 1e-3
    data = gzip.compress(many.to_csv(index=False).encode())
    (tmp_path / "cut.csv.gz").write_bytes(data[: len(data) // 2])
    (run,) = read_runs(tmp_path / "cut.csv.gz").values()
    assert 1000 < len(run.requests) < 5000
    assert run.notes[0].startswith("The file is truncated")


def test_vllm_bench_gives_its_complete_requests_wherever_it_is_cut(tmp_path):
    text, file = json.dumps(bench()), tmp_path / "cut.json"
    enough = text.index('"start_times": [100.0, ') + len('"start_times": [100.0,')
    counts = []
    for end in range(1, len(text)):
        file.write_text(text[:end])
        if end < enough:
            with pytest.raises(ConfigError, match=r"the file ends before them|no complete request"):
                read_runs(file)
            continue
        (run,) = read_runs(file).values()
        counts.append(len(run.requests))
        assert (
            run.notes[0]
            == f"The file is truncated; only its {plural(len(run.requests), 'complete request')} can be used."
        )
        assert run.latencies["ttft_s"].tolist() == LATENCIES["ttft_s"][: len(run.requests)]
    assert counts == sorted(counts)
    assert set(counts) == {1, 2, 3}


def test_the_complete_prefix_of_an_object():
    assert read_object('{"a": 1, "b": [2, 3') == ({"a": 1, "b": [2]}, False)
    assert read_object('{"a": 1, "b": [2, 3]') == ({"a": 1, "b": [2, 3]}, False)
    assert read_object('{"a": 12') == ({}, False)
    assert read_object('{"a": [[1], [2, 3], [4') == ({"a": [[1], [2, 3]]}, False)
    assert read_object('{"a": [], "b": {"c": 1}, "d') == ({"a": [], "b": {"c": 1}}, False)
    assert read_object(' {"a": 1}') == ({"a": 1}, True)
    with pytest.raises(ValueError, match="expected a JSON object"):
        read_object("[1, 2")


def test_aiperf_gives_its_complete_lines(tmp_path):
    text = lines([aiperf(row) for row in RUN])
    (tmp_path / "cut.jsonl").write_text(text[:-20])
    (run,) = read_runs(tmp_path / "cut.jsonl").values()
    assert len(run.requests) == 2
    assert run.notes[0] == "The file is truncated; only its 2 complete requests can be used."


def test_parquet_that_was_cut_says_what_to_do(tmp_path):
    file = write(tmp_path, "requests.parquet")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="its index is at its end; record again, or use the CSV"):
        read_runs(file)
