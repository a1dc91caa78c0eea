"""The page on own metrics: its metric runs on every path, and those that it shows are in the source."""

import json
from pathlib import Path

import pytest

from experiments.app.cli import main
from sim import simulate
from sim.settings.errors import ConfigError
from tests.docs.blocks import ROOT, blocks_of

METRIC, *SHOWN = [
    block.text for block in blocks_of(ROOT / "docs" / "own_metric.md") if block.language == "python"
]
SMALL = ("workload.num_requests=300", "load=60", "output.progress=false")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns a folder with the metric of the page, which can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_metrics.py").write_text(METRIC)
    return tmp_path


def run(folder, *overrides, name="run"):
    """Returns the own metrics of a run."""
    out = folder / name
    own = "metrics.own=[my_metrics.SlowStarts]"
    assert main(["simulate", *SMALL, own, f"hydra.run.dir={out}", *overrides]) == 0
    return json.loads((out / "summary.json").read_text())["own"]


def test_the_metric_is_in_the_summary_on_the_terminal_and_on_the_page(folder, capsys):
    found = run(folder)["slow_starts"]
    assert 0 < found["value"] < 100
    assert found["unit"] == "%"
    assert "slow starts" in capsys.readouterr().out
    page = (folder / "run" / "report.html").read_text(encoding="utf-8")
    assert "<th>slow starts</th>" in page
    assert "<dt>slow starts</dt><dd>Share of the requests" in page


@pytest.mark.parametrize(
    "overrides",
    [
        ["output.tables=stream"],
        ["output.tables=stream", "sim.shards=2", "replicas=2", "routing=round_robin"],
    ],
    ids=["streamed", "in shards"],
)
def test_a_run_that_streams_has_the_same_value(folder, overrides):
    others = [one for one in overrides if "tables" not in one and "shards" not in one]
    expected = run(folder, *others, "output.report=false")
    assert expected["slow_starts"]["value"] > 0
    assert run(folder, *overrides, "output.report=false", name="other") == expected


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("no_such.Metric", r"metrics.own\[0\]=no_such.Metric: must be the dotted path of a class"),
        ("json.JSONDecoder", r"metrics.own\[0\]=json.JSONDecoder: must be a subclass"),
        ("my_metrics.SlowStarts,my_metrics.SlowStarts", r"metrics.own\[1\]=.*: must have another name"),
    ],
)
def test_what_is_no_metric_is_refused(folder, own, message):
    with pytest.raises(ConfigError, match=message):
        simulate(f"metrics.own=[{own}]")


@pytest.mark.parametrize("text", SHOWN, ids=["preemptions", "retries", "adapters"])
def test_metrics_of_the_summary_are_those_of_the_source(text):
    first, _, source = text.partition("\n")
    assert source.rstrip() in Path(ROOT / first.removeprefix("# ")).read_text()
