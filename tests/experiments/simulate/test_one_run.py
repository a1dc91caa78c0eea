"""The evidence of a single run, as a user sees it: warm-up, intervals, overload."""

import json
import re

import pytest

from experiments.app.cli import main
from experiments.app.settings.compose import Composition, ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.goodput.arms import build_arms
from experiments.study.figures import figures

SMALL = ("model=smollm2_135m", "hardware=l4", "workload=poisson")


def simulate(folder, monkeypatch, *overrides):
    monkeypatch.chdir(folder)
    small = [o for o in SMALL if not any(w.startswith("workload=") for w in overrides) or "workload" not in o]
    code = main(["simulate", *small, f"hydra.run.dir={folder}/out", "output.progress=false", *overrides])
    file = folder / "out/summary.json"
    return code, json.loads(file.read_text()) if file.exists() else None


def test_an_overloaded_run_ends_early_and_says_why(tmp_path, monkeypatch, capsys):
    """60 requests/s come; a batch of two serves far fewer."""
    load = ("workload.arrivals.rate_per_s=60", "workload.num_requests=20000", "engine.max_num_seqs=2")
    code, summary = simulate(
        tmp_path, monkeypatch, *load, "sim.stop_overloaded=true", "metrics.warmup_s=auto"
    )
    assert code == 0
    found, requests = summary["overload"], summary["requests"]
    assert requests["arrived"] < 20000
    assert summary["simulated_s"] == found["at_s"]
    assert found["arrivals_per_s"] == pytest.approx(60, rel=0.2)
    assert found["outstanding"] == requests["arrived"] - requests["finished"]
    assert 0 < found["least_growth_per_s"] <= found["growth_per_s"]
    assert found["growth_per_s"] == pytest.approx(found["arrivals_per_s"] - found["ends_per_s"])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Overloaded; the run was stopped at {found['at_s']:.1f} s" in printed
    assert f"The backlog of {found['outstanding']:,} requests grows by" in printed
    assert "still running or waiting at the early end and count as missed" in printed
    assert "No steady state (MSER-5): TTFT" in printed
    assert summary["trimmed"]["warmup_s"] == 0
    page = (tmp_path / "out/report.html").read_text()
    assert "Overloaded; the run was stopped at" in page
    assert "confidence (single run):" in page or "No confidence interval for" in page


def test_a_run_that_keeps_up_is_not_stopped(tmp_path, monkeypatch, capsys):
    few = ("workload.num_requests=200", "output.report=false", "output.tables=false")
    code, summary = simulate(tmp_path, monkeypatch, *few, "sim.stop_overloaded=true")
    assert (code, summary["overload"], summary["requests"]["finished"]) == (0, None, 200)
    printed = capsys.readouterr().out
    assert "Overloaded" not in printed
    assert re.search(r"95 % confidence \(single run\): .*TTFT mean ± ", printed)


def test_a_found_warm_up_is_cut_and_reported(tmp_path, monkeypatch, capsys):
    """A queue of 200 requests at once, behind which one a second has the engine to itself."""
    trace = tmp_path / "trace.csv"
    arrivals = [0.0] * 200 + [30.0 + i for i in range(600)]
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at},200,20\n" for at in arrivals))
    code, summary = simulate(
        tmp_path,
        monkeypatch,
        *("workload=plain_csv", f"workload.path={trace}", "engine.max_num_seqs=4"),
        *("metrics.warmup_s=auto", "output.report=false", "output.tables=false"),
        "engine.host.overlapped=false",
    )
    assert code == 0, capsys.readouterr().err
    assert summary["warmup"]["settled"]
    assert summary["warmup"]["requests"] == summary["trimmed"]["requests_left_out"] == 200
    assert summary["trimmed"]["warmup_s"] == 30.0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Warm-up detected and removed (MSER-5). TTFT: the first 200 requests (" in printed
    assert "Measured from 30.0 s" in printed


@pytest.mark.parametrize(
    ("command", "override", "message"),
    [
        ("simulate", "metrics.warmup_s=atuo", "metrics.warmup_s=atuo: must be a number or auto"),
        ("simulate", "metrics.warmup_s=-1", "metrics.warmup_s=-1: must be a finite number >= 0 s, or auto"),
        ("simulate", "metrics.cooldown_s=auto", "metrics.cooldown_s=auto: must be a number"),
        ("validate", "metrics.warmup_s=auto", "must drop the same requests; give seconds"),
    ],
)
def test_a_warm_up_that_cannot_be_had_is_reported(tmp_path, monkeypatch, capsys, command, override, message):
    monkeypatch.chdir(tmp_path)
    assert main([command, override, *(["device=cpu"] if command == "validate" else [])]) == 2
    assert message in capsys.readouterr().err


def test_goodput_counts_what_the_metrics_trim():
    source = ConfigSource(config_name="goodput", dirs=[CONFIG_DIR])

    def share(*overrides):
        given = [*SMALL, "workload.num_requests=60", "slo.ttft_ms=100", *overrides]
        _, (arm,) = build_arms(source.compose(given), Composition(source, given))
        return arm.warmup_share, arm.measure(0, 4.0, 60).share

    assert share()[0] == 0.1
    assert share("metrics.warmup_s=auto")[0] is None
    # A warm-up as long as the run would leave nothing: then all counts.
    assert share("metrics.warmup_s=1e6") == (None, share("goodput.warmup_share=0")[1])


def test_a_comparison_has_no_column_for_the_noise_of_single_runs():
    summary = {"ttft": {"mean_s": 1.0}, "intervals": {"ttft": {"mean_s": {"low": 0.5}}}, "warmup": None}
    assert figures(summary) == {"ttft.mean_s": 1.0}


@pytest.mark.parametrize("override", ["workload.rate_scale=2", "+workload.rate_scale=2", "load=2"])
def test_a_rate_scale_of_a_trace_is_now_the_load(tmp_path, monkeypatch, capsys, override):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,9,2\n4,9,2\n")
    given = ["workload=plain_csv", f"workload.path={trace}", "output.report=false"]
    code, summary = simulate(tmp_path, monkeypatch, *given, override)
    if override == "load=2":
        assert code == 0
        assert 2.0 < summary["simulated_s"] < 3.0
        return
    assert code == 2
    printed = capsys.readouterr().err
    assert "workload.rate_scale: no such setting; use load=2, at the root, for the same requests" in printed
