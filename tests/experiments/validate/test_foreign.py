"""Measurements by other tools: the same run in every format, truncated files, clocks that go backwards."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.validate.fidelity.curves import between
from experiments.validate.fidelity.metrics import metric_values
from experiments.validate.foreign.complete_prefix import read_object
from experiments.validate.foreign.read import read_runs
from experiments.validate.foreign.request_tables import CLIENTS_TIMES
from sim.report.wording import plural
from sim.settings.errors import ConfigError

# Three requests on a clock that begins at 100 s: sent, first token, last token, prompt and output tokens.
RUN = [(100.0, 100.5, 101.5, 64, 11), (100.25, 101.0, 101.0, 32, 1), (101.0, 101.25, 102.25, 16, 5)]
LATENCIES = {"ttft_s": [0.5, 0.75, 0.25], "e2e_s": [1.5, 0.75, 1.25], "tpot_s": [0.1, np.nan, 0.25]}


def csv_text(**extra) -> str:
    columns = ["arrival_s", "first_token_s", "last_token_s", "input_tokens", "output_tokens"]
    return pd.DataFrame(RUN, columns=columns).assign(**extra).to_csv(index=False)


def bench(failed: bool = False) -> dict:
    """Returns the run as `vllm bench serve --save-detailed` writes it."""
    gaps = [[0.1] * 10, [], [0.25] * 4]
    found = {
        "date": "20261122-000000",
        "duration": 2.25,
        "input_lens": [row[3] for row in RUN],
        "output_lens": [row[4] for row in RUN],
        "ttfts": [row[1] - row[0] for row in RUN],
        "itls": gaps,
        "start_times": [row[0] for row in RUN],
        "generated_texts": ["a, ]b", 'c"}', "d"],
        "errors": ["", "", ""],
    }
    if failed:
        found["errors"][1], found["output_lens"][1], found["ttfts"][1] = "Connection refused", 0, 0.0
    return found


def aiperf(row: tuple, **about) -> dict:
    sent_s, first_s, last_s, prompt, output = row
    figures = {
        "time_to_first_token": (1e3 * (first_s - sent_s), "ms"),
        "request_latency": (1e3 * (last_s - sent_s), "ms"),
        "input_sequence_length": (prompt, "tokens"),
        "output_sequence_length": (output, "tokens"),
    }
    return {
        "metadata": {"request_start_ns": int(1e9 * sent_s), "benchmark_phase": "profiling", **about},
        "metrics": {name: {"value": value, "unit": unit} for name, (value, unit) in figures.items()},
        "error": None,
    }


def lines(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write(folder: Path, name: str) -> Path:
    """Writes the run in the format that the file name stands for."""
    file = folder / name
    if name == "requests.csv.gz":
        file.write_bytes(gzip.compress(csv_text().encode()))
    elif name.endswith(".csv"):
        file.write_text(csv_text())
    elif name == "bench.json":
        file.write_text(json.dumps(bench()))
    elif name == "profile_export.jsonl":
        ends = sorted(RUN, key=lambda row: row[2])
        file.write_text(lines([aiperf(row) for row in ends]))
    else:
        columns = ["arrival_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens"]
        pd.DataFrame(RUN, columns=columns).assign(status="finished").to_parquet(file)
    return file


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


# Cut short


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


# What cannot be right


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
    assert refused(tmp_path / "b.json").startswith("row 3: the clock goes backwards: last_token_s=96.35")
    (tmp_path / "c.jsonl").write_text(lines([aiperf(RUN[0]), aiperf((100.0, 99.0, 101.0, 4, 4))]))
    assert refused(tmp_path / "c.jsonl").startswith("row 2: the clock goes backwards: first_token_s=")


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
        ("input_tokens", "0", "row 2: input_tokens=0: must be a whole number >= 1"),
        ("output_tokens", "2.5", "row 2: output_tokens=2.5: must be a whole number >= 0"),
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
