"""Measurements by other tools: the same run in every format."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from experiments.validate.fidelity.curves import between
from experiments.validate.fidelity.metrics import metric_values
from experiments.validate.foreign.read import read_runs
from experiments.validate.foreign.request_tables import CLIENTS_TIMES
from tests.experiments.validate.foreign_files import LATENCIES, RUN, aiperf, bench, csv_text, lines, write


@pytest.mark.parametrize(
    "name", ["requests.csv", "requests.csv.gz", "bench.json", "profile_export.jsonl", "requests.parquet"]
)
def test_every_format_tells_the_same_run(tmp_path, name):
    (run,) = read_runs(write(tmp_path, name)).values()
    latencies = run.latencies
    for column, expected in LATENCIES.items():
        assert latencies[column].tolist() == pytest.approx(expected, nan_ok=True)
    assert np.diff(run.requests["arrival_s"]).tolist() == pytest.approx([0.25, 0.75])
    assert run.requests["prompt_tokens"].tolist() == [64, 32, 16]
    assert run.requests["output_tokens"].tolist() == [11, 1, 5]
    assert (run.requests["status"] == "finished").all()
    if name != "requests.parquet":
        assert run.requests["arrival_s"].iloc[0] == 0


@pytest.mark.parametrize("name", ["requests.parquet", "requests.csv", "profile_export.jsonl"])
def test_a_folder_stands_for_what_lies_in_it(tmp_path, name):
    write(tmp_path, name)
    assert len(read_runs(tmp_path)) == 1


def test_several_runs_in_one_table(tmp_path):
    text = pd.concat(
        [pd.read_csv(write(tmp_path, "one.csv")).assign(run=name) for name in ("night", "day")]
    ).to_csv(index=False)
    (tmp_path / "runs.csv").write_text(text)
    assert list(read_runs(tmp_path / "runs.csv")) == ["night", "day"]


def test_an_engine_that_says_when_it_took_a_request_is_asked(tmp_path):
    (tmp_path / "a.csv").write_text(csv_text(queued_s=[100.25, 100.5, 101.0]))
    (run,) = read_runs(tmp_path / "a.csv").values()
    assert run.latencies["ttft_s"].tolist() == pytest.approx([0.25, 0.5, 0.25])
    assert any("engine took a request" in note for note in run.notes)


def test_gaps_of_vllm_bench(tmp_path):
    (run,) = read_runs(write(tmp_path, "bench.json")).values()
    assert run.gaps is not None
    assert sorted(run.gaps.gap_s.tolist()) == [0.1] * 10 + [0.25] * 4
    assert run.gaps.gap_end_s.max() == pytest.approx(2.25)
    assert run.gaps.gap_end_s[0] == pytest.approx(0.6)


def test_failed_requests_are_reported_and_left_out(tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(bench(failed=True)))
    (run,) = read_runs(tmp_path / "bench.json").values()
    assert run.requests["row"].tolist() == [1, 3]
    failed = (
        "1 of 3 requests failed; they are not simulated. The measured figures exclude them, though the "
        "server may have worked on them."
    )
    assert run.notes[-1] == failed
    broken = aiperf(RUN[1]) | {"error": {"code": 500}, "metrics": {}}
    (tmp_path / "a.jsonl").write_text(lines([aiperf(RUN[0]), broken, aiperf(RUN[2], was_cancelled=True)]))
    (run,) = read_runs(tmp_path / "a.jsonl").values()
    assert run.requests["row"].tolist() == [1]
    table = pd.read_csv(write(tmp_path, "a.csv"))
    table.loc[1, "last_token_s"] = np.nan
    table.to_csv(tmp_path / "a.csv", index=False)
    (run,) = read_runs(tmp_path / "a.csv").values()
    assert run.requests["row"].tolist() == [1, 3]
    assert set(run.requests["status"]) == {"finished"}
    assert run.notes == (failed,)
    table.assign(prefix_block_ids=["1 2", "3", "4"]).to_csv(tmp_path / "a.csv", index=False)
    (run,) = read_runs(tmp_path / "a.csv").values()
    assert run.block_ids == ((1, 2), (4,))


def test_warm_up_of_aiperf_is_left_out(tmp_path):
    records = [aiperf(RUN[0], benchmark_phase="warmup"), *map(aiperf, RUN[1:])]
    (tmp_path / "a.jsonl").write_text(lines(records))
    (run,) = read_runs(tmp_path / "a.jsonl").values()
    assert len(run.requests) == 2
    assert "1 request of the warm-up was excluded." in run.notes


def test_what_a_server_logged_lies_beside(tmp_path):
    write(tmp_path, "requests.csv")
    log = {"t": [100.5, 101.5], "running": [2, 1], "waiting": [0, 0], "kv_cache_pct": [50.0, 25.0]}
    pd.DataFrame(log).to_csv(tmp_path / "timeseries.csv", index=False)
    (run,) = read_runs(tmp_path / "requests.csv").values()
    assert run.samples is not None
    assert run.samples["time_s"].tolist() == [0.5, 1.5]
    assert run.samples["kv_use_share"].tolist() == [0.5, 0.25]


def test_chunks_and_prefixes_of_an_observed_run(tmp_path):
    columns = ["arrival_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens"]
    table = pd.DataFrame(RUN, columns=columns).assign(status="finished", request_id=[7, 8, 9])
    table.loc[1, "status"] = "aborted"
    table.to_parquet(tmp_path / "requests.parquet")
    chunks = [(9, 101.25, 1), (7, 100.5, 1), (9, 102.25, 4), (7, 101.5, 10), (8, 101.0, 3)]
    pd.DataFrame(chunks, columns=["request_id", "time_s", "tokens"]).to_parquet(tmp_path / "chunks.parquet")
    captured = pd.DataFrame({"req": [9, 7], "prefix_block_ids": ["3", "1 2"]})
    captured.to_csv(tmp_path / "requests.csv.gz", index=False)
    (run,) = read_runs(tmp_path).values()
    assert run.gaps is not None
    assert sorted(run.gaps.gap_s.tolist()) == [0.0] * 12 + [1.0, 1.0]
    assert run.gaps.gap_end_s.tolist() == [101.5] * 10 + [102.25] * 4
    assert run.block_ids == ((1, 2), (3,))


def test_what_began_of_a_failed_request_is_in_no_figure(tmp_path):
    """Its first token, its tokens and its gaps are not simulated, nor does it stay in flight for ever."""
    columns = ["arrival_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens"]
    table = pd.DataFrame(RUN, columns=columns).assign(status="finished", request_id=[0, 1, 2])
    table.loc[1, ["status", "last_token_s"]] = ["aborted", np.nan]
    table.to_parquet(tmp_path / "requests.parquet")
    (run,) = read_runs(tmp_path).values()
    assert run.requests["request_id"].tolist() == [0, 2]
    span_s = RUN[2][2] - RUN[0][0]
    rates = {metric.name: value for metric, value in metric_values(run, ()).items()}
    assert rates["output_tokens_per_s"] == pytest.approx((RUN[0][4] + RUN[2][4]) / span_s)
    begin_s, end_s = (run.requests[name].to_numpy() for name in ("arrival_s", "last_token_s"))
    in_flight = between(begin_s, end_s, np.array([100.0, 102.25, 103.0]))
    assert run.notes[0].startswith("1 of 3 requests failed; they")
    table.assign(status=["finished", "unfinished", "aborted"]).to_parquet(tmp_path / "requests.parquet")
    (cut,) = read_runs(tmp_path).values()
    assert cut.notes[0].startswith("2 of 3 requests failed or were unfinished; they are not simulated.")
    assert in_flight.tolist() == pytest.approx([(1.5 + 1.25) / 2.25, 0.0])


def test_an_observed_run_says_what_it_is_in_each_of_its_files(tmp_path):
    file = write(tmp_path, "requests.parquet")
    pd.read_parquet(file).assign(request_id=[0, 1, 2]).to_parquet(file)
    table = pd.read_csv(write(tmp_path, "requests.csv"))
    table.assign(queued_s=table["arrival_s"]).to_csv(tmp_path / "requests.csv", index=False)
    pd.DataFrame({"request_id": [0], "time_s": [0.1], "tokens": [1]}).to_parquet(tmp_path / "chunks.parquet")
    endpoint = {"model": "tiny", "url": "http://there"}
    summary = {"source": "observed", "endpoint": endpoint, "notes": ["Given up after 3.0 s."]}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    wanted = (
        "Measured was tiny at http://there; it cannot be checked that model= and hardware= are the same.",
        "Given up after 3.0 s.",
        CLIENTS_TIMES,
    )
    for name in ("requests.parquet", "requests.csv"):
        (run,) = read_runs(tmp_path / name).values()
        assert run.notes == wanted
    (tmp_path / "summary.json").unlink()
    (run,) = read_runs(tmp_path / "requests.csv").values()
    assert "Arrival is when the engine took a request" in run.notes[0]
    (run,) = read_runs(tmp_path / "requests.parquet").values()
    assert run.notes == (CLIENTS_TIMES,)
