"""`windtunnel dialects`, and the same tables in the summary of a simulation."""

import json

import pandas as pd
import pytest

from experiments.app.cli import main
from experiments.report.dialects.command import parse
from experiments.validate.foreign.bench_exports import read_vllm_bench
from experiments.validate.foreign.complete_prefix import read_lines
from sim.metrics.dialects import DIALECTS, DIFFERENCES
from sim.settings.errors import ConfigError

SMALL = ("workload=poisson", "workload.num_requests=60", "engine.num_kv_blocks=400", "output.report=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Simulates with preemptions, all dialects and an exported result; returns the run's folder."""
    folder = tmp_path_factory.mktemp("run")
    asked = ("metrics.dialect=all", "output.vllm_bench=true", "workload.arrivals.rate_per_s=40")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        assert main(["simulate", *SMALL, *asked, f"hydra.run.dir={folder}/out", "output.progress=false"]) == 0
    return folder / "out"


def test_a_finished_run_is_reported_as_it_was_while_it_ran(folder, capsys):
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["dialects"]) == list(DIALECTS)
    assert summary["preemptions"] > 0
    assert main(["dialects", f"run={folder}"]) == 0
    printed = capsys.readouterr().out
    for name in ("ours", "vLLM bench", "guidellm", "AIPerf", "MLPerf", "per token after the first"):
        assert name in printed
    assert all(line[:20] in printed for line in DIFFERENCES)
    mean_ms = 1e3 * summary["dialects"]["guidellm"]["per_token_with_first"]["mean_s"]
    assert f"{mean_ms:#.3g}" in printed


def test_one_dialect_is_reported_in_its_own_words(folder, capsys):
    assert main(["dialects", f"run={folder}", "dialect=aiperf"]) == 0
    printed = capsys.readouterr().out
    assert "Output Token Throughput (tokens/sec)" in printed
    assert "ICL" in printed
    assert "guidellm" not in printed


def test_ours_and_vllms_figures_are_the_same_where_all_is_answered(folder):
    summary = json.loads((folder / "summary.json").read_text())
    found = summary["dialects"]["vllm_bench"]
    for ours, theirs in (("ttft", "ttft"), ("tpot", "per_token"), ("itl", "gap"), ("e2e", "e2e")):
        for name in ("mean_s", "p50_s", "p90_s", "p99_s"):
            assert summary[ours][name] == pytest.approx(found[theirs][name], rel=1e-6)


def test_the_export_is_read_by_validate(folder):
    found = json.loads((folder / "vllm_bench.json").read_text())
    requests = pd.read_parquet(folder / "requests.parquet").sort_values("arrival_s", kind="stable")
    assert found["completed"] == len(requests) == 60
    assert [1 + len(itls) for itls in found["itls"]] == found["output_lens"]
    read = read_vllm_bench("out", read_lines(folder / "vllm_bench.json"))
    assert read.latencies["ttft_s"].tolist() == pytest.approx(requests["ttft_s"].tolist(), abs=1e-8)
    assert read.latencies["e2e_s"].tolist() == pytest.approx(requests["e2e_s"].tolist(), abs=1e-6)
    assert read.requests["output_tokens"].tolist() == requests["output_tokens"].tolist()


def test_a_folder_is_exported_afterwards(folder, tmp_path, capsys):
    for name in ("summary.json", "config.yaml", "requests.parquet", "iterations.parquet", "gaps.parquet"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert main(["dialects", f"run={tmp_path}", "vllm_bench=true"]) == 0
    now, then = (json.loads((one / "vllm_bench.json").read_text()) for one in (tmp_path, folder))
    assert {**now, "date": then["date"]} == then
    assert "vllm_bench.json" in capsys.readouterr().out


def test_a_simulation_prints_the_dialect_that_was_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = (*SMALL, "workload.num_requests=20", "output.tables=false", "output.progress=false")
    assert main(["simulate", *few, "metrics.dialect=guidellm", "workload.branching.width=2"]) == 0
    printed = capsys.readouterr().out
    assert "output_tokens_per_second" in printed
    assert "AIPerf" not in printed
    (summary,) = (json.loads(file.read_text()) for file in tmp_path.glob("outputs/simulate/*/*/summary.json"))
    assert list(summary["dialects"]) == ["guidellm"]


def test_rates_count_the_tokens_of_every_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = (*SMALL, "workload.num_requests=20", "output.report=false", "output.progress=false")
    assert main(["simulate", *few, "metrics.dialect=all", "workload.branching.width=4"]) == 0
    (file,) = tmp_path.glob("outputs/simulate/*/*/summary.json")
    dialects = json.loads(file.read_text())["dialects"]
    requests = pd.read_parquet(file.with_name("requests.parquet"))
    assert (requests["status"] == "finished").all()
    tokens, longest = (requests[f"{name}_tokens"] for name in ("output", "longest"))
    assert tokens.sum() > 2 * longest.sum()
    for name in ("vllm_bench", "aiperf", "mlperf"):
        rate, duration_s = (dialects[name][key]["value"] for key in ("output_tokens_per_s", "duration_s"))
        assert rate * duration_s == pytest.approx(tokens.sum())
    span_s = requests["last_token_s"].max() - requests["first_token_s"].min()
    assert dialects["guidellm"]["output_tokens_per_s"]["value"] * span_s == pytest.approx(tokens.sum())
    several = requests[longest > 1]
    tpot_s = (several["last_token_s"] - several["first_token_s"]) / (several["longest_tokens"] - 1)
    assert dialects["vllm_bench"]["per_token"]["mean_s"] == pytest.approx(tpot_s.mean())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dialect=vllm_bench"], "run: must be given"),
        (["run=nowhere"], "run=nowhere: no such folder"),
        (["rum=x"], "rum: no such setting; nearest: run"),
        (
            ["run=.", "dialect=vllm"],
            "dialect=vllm: no such dialect; nearest: vllm_bench; allowed: vllm_bench, guidellm",
        ),
        (["run=.", "vllm_bench=yes"], "vllm_bench=yes: must be true or false"),
    ],
)
def test_what_cannot_be_reported_is_refused(arguments, message):
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("missing", ["summary.json", "gaps.parquet", "requests.parquet"])
def test_a_folder_without_what_is_needed_says_so(folder, tmp_path, missing, capsys):
    for file in folder.iterdir():
        if file.name != missing:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert main(["dialects", f"run={tmp_path}"]) == 2
    printed = capsys.readouterr().err
    assert f"contains no {missing}; simulate it again with output.tables=true" in printed


def test_a_layout_for_one_answer_refuses_several(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *SMALL, "output.vllm_bench=true", "workload.branching.width=2"]) == 2
    assert (
        "output.vllm_bench=true, workload.branching.width=2: this format has one" in capsys.readouterr().err
    )


def test_a_dialect_that_there_is_not_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "metrics.dialect=genai"]) == 2
    assert "metrics.dialect=genai: must be one of ours, vllm_bench, guidellm" in capsys.readouterr().err


def test_help_is_printed(capsys):
    assert main(["dialects", "--help"]) == 0
    assert "usage: windtunnel dialects run=DIR" in capsys.readouterr().out
