"""Results as other tools write them, and values in them that no run can have."""

import json
import os
import time

import numpy as np
import pandas as pd
import pytest

from experiments.validate.foreign.read import read_runs
from sim.settings.errors import ConfigError
from tests.experiments.validate.foreign_files import LATENCIES, RUN, aiperf, bench, lines


def refused(path):
    begun = time.monotonic()
    with pytest.raises(ConfigError) as error:
        read_runs(path)
    assert time.monotonic() - begun < 5
    return str(error.value)


def write(folder, content, name="a.json"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 10**30, "a", None, True, [1]])
@pytest.mark.parametrize("field", ["start_times", "ttfts", "itls"])
def test_times_that_no_run_can_have_are_named(tmp_path, field, value):
    if field == "start_times" and value == -0.5:
        pytest.skip("a clock without a zero may be before it")
    found = bench()
    if field == "itls":
        found[field][2][1] = value
    else:
        found[field][2] = value
    place = r"itls[2][1]" if field == "itls" else f"{field}[2]"
    message = refused(write(tmp_path, found))
    assert f"a.json: row 3: {place}=" in message
    assert "must be a finite number" in message


@pytest.mark.parametrize("value", [-5, 100.7, 10**30, "a", None, float("nan"), float("inf"), True, 0])
@pytest.mark.parametrize("field", ["input_lens", "output_lens"])
def test_lengths_that_no_run_can_have_are_named(tmp_path, field, value):
    if field == "output_lens" and value == 0:
        pytest.skip("a failed request has no output")
    found = bench()
    found[field][0] = value
    assert f"a.json: row 1: {field}[0]={value}" in refused(write(tmp_path, found)).replace("None", str(None))


def test_whole_floats_are_lengths(tmp_path):
    found = bench()
    found["input_lens"] = [float(value) for value in found["input_lens"]]
    (run,) = read_runs(write(tmp_path, found)).values()
    assert run.requests["prompt_tokens"].tolist() == [row[3] for row in RUN]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("time_to_first_token", float("nan")),
        ("request_latency", -1.0),
        ("input_sequence_length", 5.5),
        ("output_sequence_length", 10**30),
        ("time_to_first_token", "a"),
    ],
)
def test_values_of_aiperf_are_checked(tmp_path, key, value):
    record = aiperf(RUN[1])
    record["metrics"][key]["value"] = value
    path = write(tmp_path, lines([aiperf(RUN[0]), record]), "p.jsonl")
    assert f"p.jsonl: row 2: {key}={value}" in refused(path)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("arrival_s", np.nan),
        ("arrival_s", np.inf),
        ("first_token_s", np.nan),
        ("prompt_tokens", -100.0),
        ("prompt_tokens", 100.7),
        ("output_tokens", 1e30),
        ("prompt_tokens", "a"),
    ],
)
def test_values_of_our_own_tables_are_checked(tmp_path, column, value):
    columns = ["arrival_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens"]
    table = pd.DataFrame(RUN, columns=columns).assign(status="finished")
    table[column] = [*table[column][:1], value, *table[column][2:]]
    table[column] = table[column].astype(str if value == "a" else float)
    table.to_parquet(tmp_path / "requests.parquet")
    assert f"row 2: {column}={value}: must be" in refused(tmp_path / "requests.parquet")


@pytest.mark.parametrize("value", [1e30, -3.0, "1e400"])
def test_values_of_csv_are_checked(tmp_path, value):
    row = f"arrival_s,input_tokens,output_tokens,first_token_s,last_token_s\n0,{value},5,1,2\n"
    assert "row 1: input_tokens=" in refused(write(tmp_path, row, "r.csv"))


def test_deep_json_is_refused(tmp_path):
    assert "too deeply" in refused(write(tmp_path, '{"a":' * 100_000, "a.json"))


def test_long_lines_are_no_truncated_file(tmp_path):
    """A result has its figures in one line; those of a thousand requests have more than 4 MB."""
    found = bench() | {"generated_texts": ["x" * 6_000_000, "", ""]}
    (run,) = read_runs(write(tmp_path, found)).values()
    assert len(run.requests) == 3
    assert not any("truncated" in note for note in run.notes)


def sglang(**changes):
    found = bench()
    del found["start_times"]
    about = {
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": float("inf"),
        "max_concurrency": None,
    }
    return about | found | changes


def test_sglang_has_a_run_per_line_of_requests_that_came_at_once(tmp_path):
    path = write(tmp_path, lines([sglang()]), "s.jsonl")
    (run,) = read_runs(path).values()
    assert run.requests["arrival_s"].tolist() == [0.0] * 3
    np.testing.assert_allclose(run.latencies["ttft_s"], LATENCIES["ttft_s"])
    assert any("sent at once" in note for note in run.notes)
    path = write(tmp_path, lines([sglang(), sglang()]), "t.jsonl")
    assert list(read_runs(path)) == ["line_1", "line_2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_rate": 4.0}, "does not store when it sent its requests"),
        ({"max_concurrency": 8}, "does not store when it sent its requests"),
        ({"ttfts": None}, "ttfts missing; SGLang's bench_serving writes them with --output-details"),
        ({"ttfts": [0.5, float("nan"), 0.2]}, r"row 2: ttfts[1]=nan"),
    ],
)
def test_sglang_that_cannot_be_compared_says_why(tmp_path, changes, message):
    assert message in refused(write(tmp_path, lines([sglang(**changes)]), "s.jsonl"))


def guidellm(row, *, old=False):
    start, first, last, prompt, output = row
    counts = {"prompt_tokens": prompt, "output_tokens": output}
    if old:
        return counts | {"start_time": start, "first_token_time": first, "last_token_time": last}
    timings = {"request_start": start, "first_token_iteration": first, "last_token_iteration": last}
    return counts | {"request_id": "r", "info": {"status": "completed", "timings": timings}}


@pytest.mark.parametrize("old", [False, True])
def test_guidellm_has_a_run_per_benchmark(tmp_path, old):
    requests = {"successful": [guidellm(row, old=old) for row in RUN], "errored": [], "incomplete": []}
    (run,) = read_runs(write(tmp_path, {"benchmarks": [{"requests": requests}]})).values()
    np.testing.assert_allclose(run.latencies["ttft_s"], LATENCIES["ttft_s"])
    np.testing.assert_allclose(run.latencies["tpot_s"], LATENCIES["tpot_s"])
    several = {"benchmarks": [{"requests": requests}] * 2}
    assert list(read_runs(write(tmp_path, several))) == ["benchmark_1", "benchmark_2"]


def test_guidellm_counts_requests_that_failed(tmp_path):
    requests = {"successful": [guidellm(row) for row in RUN[:2]], "errored": [guidellm(RUN[2])]}
    (run,) = read_runs(write(tmp_path, {"benchmarks": [{"requests": requests}]})).values()
    assert len(run.requests) == 2
    assert any("1 of 3 requests failed" in note for note in run.notes)


@pytest.mark.parametrize("value", [float("nan"), "a", None, 10**30])
def test_values_of_guidellm_are_checked(tmp_path, value):
    one = guidellm(RUN[0])
    one["info"]["timings"]["first_token_iteration"] = value
    requests = {"successful": [one]}
    message = refused(write(tmp_path, {"benchmarks": [{"requests": requests}]}))
    assert f"benchmarks[0]: requests.successful[0]: first_token_iteration={value}" in message


def test_a_summary_of_aiperf_names_the_file_with_the_requests(tmp_path):
    found = {"request_latency": {"unit": "ms", "avg": 5.0}, "request_throughput": {"unit": "1/s", "avg": 2.0}}
    assert "give profile_export.jsonl beside it" in refused(write(tmp_path, found))


@pytest.mark.parametrize("name", ["a.json", "a.csv", "requests.parquet", "a.csv.gz"])
def test_pipes_and_devices_are_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert "must be a regular file" in refused(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    assert "must be a regular file" in refused(tmp_path / name)


def test_a_small_table_with_many_repeated_rows_is_refused_by_its_footer(tmp_path):
    table = pd.DataFrame({"arrival_s": np.zeros(10_000_000), "first_token_s": 1.0, "last_token_s": 2.0})
    table["prompt_tokens"] = table["output_tokens"] = np.int64(5)
    table["status"] = pd.Categorical.from_codes(np.zeros(len(table), np.int8), ["finished"])
    table.to_parquet(tmp_path / "requests.parquet", row_group_size=1_000_000)
    assert (tmp_path / "requests.parquet").stat().st_size < 3 << 20
    message = refused(tmp_path / "requests.parquet")
    assert "10,000,000 rows" in message
    assert "WINDTUNNEL_MAX_TABLE_BYTES" in message


def inference_perf(row, *, old=False):
    start, first, last, prompt, output = row
    times = np.linspace(first, last, output).tolist()
    if old:
        info = {"input_tokens": prompt, "output_tokens": output, "output_token_times": times}
    else:
        usage = {"prompt_tokens": prompt, "completion_tokens": output}
        response = {"output_tokens": output + 1, "output_token_times": times, "server_usage": usage}
        request = {"text": {"input_tokens": prompt + 1}}
        info = {"request_metrics": request, "response_metrics": response, "input_tokens": prompt + 1}
    return {
        "start_time": start,
        "end_time": last,
        "request": "{}",
        "response": "",
        "info": info,
        "error": None,
    }


@pytest.mark.parametrize("old", [False, True])
def test_inference_perf_tells_the_run_with_the_tokens_of_the_server(tmp_path, old):
    write(tmp_path, [inference_perf(row, old=old) for row in RUN], "per_request_lifecycle_metrics.json")
    (run,) = read_runs(tmp_path).values()
    for column, expected in LATENCIES.items():
        np.testing.assert_allclose(run.latencies[column], expected)
    assert run.requests["prompt_tokens"].tolist() == [row[3] for row in RUN]
    assert run.requests["output_tokens"].tolist() == [row[4] for row in RUN]


def test_inference_perf_counts_failures_and_reads_what_is_complete(tmp_path):
    found = [inference_perf(row) for row in RUN]
    found[1] |= {"error": {"error_type": "Timeout", "error_msg": ""}, "info": None}
    path = write(tmp_path, found)
    (run,) = read_runs(path).values()
    assert len(run.requests) == 2
    assert any("1 of 3 requests failed" in note for note in run.notes)
    text = path.read_text()
    (run,) = read_runs(write(tmp_path, text[: text.rindex("start_time")], "cut.json")).values()
    assert any("truncated" in note for note in run.notes)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("start_time", float("nan"), "request 2: start_time=nan"),
        ("start_time", "a", "request 2: start_time=a"),
        ("input_tokens", 5.5, "request 2: input_tokens=5.5"),
        ("output_tokens", -3, "request 2: output_tokens=-3"),
        (
            "output_token_times",
            [],
            "request 2: output_token_times missing; run inference-perf with streaming",
        ),
        ("output_token_times", [2.0, 1.0], "request 2: output_token_times: must not decrease"),
        ("output_token_times", [2.0, "a"], "request 2: output_token_times[1]=a"),
        ("output_token_times", 5, "request 2: output_token_times=5: must be a list"),
    ],
)
def test_values_of_inference_perf_are_checked(tmp_path, where, value, message):
    found = [inference_perf(row, old=True) for row in RUN]
    (found[1] if where in found[1] else found[1]["info"])[where] = value
    assert message in refused(write(tmp_path, found))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"ttft_s": 0.5, "number_input_tokens": 5}], "LLMPerf does not store when it sent its requests"),
        ({"load_summary": {}, "successes": {}}, "give per_request_lifecycle_metrics.json"),
        ({"experiments": [{"requests": []}]}, "profile of genai-perf or perf_analyzer, without numbers"),
        ([1, 2], "request 1: start_time missing"),
        ("[", "no complete request"),
        ("[]", "no complete request"),
    ],
)
def test_what_lacks_requests_says_which_file_has_them(tmp_path, content, message):
    assert message in refused(write(tmp_path, content))
