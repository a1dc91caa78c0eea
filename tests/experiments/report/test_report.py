"""windtunnel report: it draws what was saved, and simulates nothing."""

import json
import math
import re
import shutil
import sys

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from scipy import stats

from experiments.app.cli import main
from experiments.study.export import export
from experiments.sweep.figures import heat_map, lines, parallel
from experiments.sweep.grid import MAX_PANELS, grid_of
from experiments.sweep.page import rows
from experiments.sweep.plan import Plan
from experiments.sweep.settings import ReportSettings
from sim.settings.errors import ConfigError
from sim.setup.scenario import Scenario

TTFT, COST = "ttft.p99_s", "cost.usd"
SMALL = ("model=smollm2_135m", "hardware=l4", "workload=poisson", "workload.num_requests=40")


def table(**axes):
    """Returns one row per combination; TTFT is 0.1 s * (1 + index of the configuration) + 1 ms * seed."""
    index = pd.MultiIndex.from_product(axes.values(), names=list(axes))
    found = index.to_frame(index=False)
    names = [key for key in axes if key != "seed"]
    configuration = found.groupby(names, sort=False).ngroup() if names else 0
    seed = found["seed"] if "seed" in axes else 0
    found[TTFT] = 0.1 * (1 + configuration) + 1e-3 * seed
    found[COST] = 1.0
    return found.assign(run=range(len(found)), status="done", error="", wall_s=0.1, code="c")


def grid(settings=None, **axes):
    return grid_of(table(**axes), list(axes), settings or ReportSettings(metrics=(TTFT, COST)), [])


def places(found):
    key = {
        name: axis.key if axis else None
        for name, axis in (("x", found.x), ("y", found.y), ("colour", found.colour))
    }
    return key | {"facets": [axis.key for axis in found.facets]}


def test_axes_find_their_places():
    many = {"engine": ["a", "b"], "load": [1, 2, 4], "replicas": [2, 1], "seed": [0, 1]}
    assert places(grid(**many)) == {"x": "load", "y": "engine", "colour": "engine", "facets": ["replicas"]}
    assert places(grid(seed=[0, 1])) == {"x": None, "y": None, "colour": None, "facets": []}
    assert any("the seed is the only axis" in caveat for caveat in grid(seed=[0, 1]).caveats)
    assert places(grid(engine=["a", "b"])) == {"x": "engine", "y": None, "colour": None, "facets": []}
    asked = ReportSettings(metrics=(TTFT,), x="replicas", colour="load", facet=("engine",), y="engine")
    assert places(grid(asked, **many)) == {
        "x": "replicas",
        "y": "engine",
        "colour": "load",
        "facets": ["engine"],
    }
    longest = grid(policy=list("abcdefghij"), load=[1, 2], engine=["a", "b"])
    assert places(longest) == {
        "x": "load",
        "y": "engine",
        "colour": "engine",
        "facets": ["policy"],
    }  # ten colours look alike


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"x": "lode"}, "^report.x=lode: is not an axis of this sweep; nearest: load"),
        (
            {"colour": "seed"},
            "^report.colour=seed: is not an axis of this sweep; seeds are used for the intervals",
        ),
        ({"facet": ("engin",)}, "^report.facet=engin: is not an axis of this sweep; nearest: engine"),
        (
            {"metrics": ("ttft.p98_s",)},
            r"^metric=ttft.p98_s: these runs have no such metric; nearest: ttft.p99_s",
        ),
    ],
)
def test_what_the_sweep_does_not_have_is_reported(settings, message):
    with pytest.raises(ConfigError, match=message):
        grid(ReportSettings(**settings), engine=["a", "b"], load=[1, 2], seed=[0, 1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": ("pdf",)}, "format=pdf: no such format"),
        ({"format": ()}, r"format=\[\]: must contain at least one of"),
        ({"metrics": ()}, r"metrics=\[\]: must contain at least one metric"),
        ({"x": "a", "colour": "a"}, "a can have only one role"),
        ({"x": "a", "y": "a"}, "a can have only one role"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ReportSettings(**settings)


def test_lines_are_means_with_t_intervals_in_milliseconds():
    found = grid(engine=["a", "b"], load=[1, 2, 16], seed=[0, 1, 4])
    drawing = lines(found, found.metrics[0])
    means = {trace.name: trace for trace in drawing.data if trace.mode == "lines+markers"}
    assert list(means) == ["a", "b"]
    assert list(means["a"].x) == [1, 2, 16]
    assert list(means["b"].y) == pytest.approx([1e3 * (0.1 * k) + 5 / 3 for k in (4, 5, 6)])
    half = stats.t.ppf(0.975, 2) * stats.sem([0.0, 1.0, 4.0])  # ms, by the seeds alone
    band = drawing.data[0]
    assert band.fill == "toself"
    assert np.array(band.y[:3]) - np.array(band.y[3:][::-1]) == pytest.approx([2 * half] * 3)
    assert drawing.layout.xaxis.type == "log"
    assert drawing.layout.xaxis.title.text == "load"


def test_names_along_x_get_bars_and_no_line_between_them():
    found = grid(engine=["a", "b"], seed=[0, 1])
    (points,) = lines(found, found.metrics[0]).data
    assert points.mode == "markers"
    assert list(points.x) == ["a", "b"]
    assert points.error_y.array[0] == pytest.approx(stats.t.ppf(0.975, 1) * 0.5)


def test_a_map_has_every_cell_and_gaps_where_nothing_is_done():
    runs = table(load=[1, 2, 4], replicas=[1, 2])
    runs = runs.drop(index=3)  # load 2, replicas 2
    found = grid_of(runs, ["load", "replicas"], ReportSettings(metrics=(TTFT,)), [])
    (cells,) = heat_map(found, found.metrics[0]).data
    assert list(cells.x) == ["1", "2", "4"]
    assert [list(row) for row in cells.z] == [
        pytest.approx([100, 300, 500]),
        [pytest.approx(200), None, pytest.approx(600)],
    ]


def test_figures_far_apart_are_drawn_on_logarithmic_scales():
    runs = table(load=[1, 2, 4], replicas=[1, 2], seed=[0, 1])
    runs[TTFT] = np.repeat([0.01, 0.02, 0.1, 0.2, 1.0, 2.0], 2) * np.tile([0.5, 1.5], 6)
    found = grid_of(runs, ["load", "replicas", "seed"], ReportSettings(metrics=(TTFT, COST)), [])
    (cells,) = heat_map(found, found.metrics[0]).data
    assert [list(row) for row in cells.z] == [
        pytest.approx([1, 2, 3]),
        pytest.approx(np.log10([20, 200, 2000])),
    ]
    assert [list(row) for row in cells.text] == [["10", "100", "1,000"], ["20", "200", "2,000"]]
    bar = heat_map(found, found.metrics[0]).layout.coloraxis.colorbar
    assert list(bar.ticktext) == ["10", "30", "100", "300", "1,000"]
    drawing = lines(found, found.metrics[0])
    assert drawing.layout.yaxis.type == "log"
    assert all(min(trace.y) == pytest.approx(5) for trace in drawing.data[:1])  # the band would reach below 0
    assert lines(found, found.metrics[1]).layout.yaxis.type != "log"


def test_parallel_coordinates_go_through_every_axis_and_figure():
    found = grid(engine=["a", "b"], load=[1, 2], seed=[0, 1])
    (drawn,) = parallel(found).data
    assert [one.label for one in drawn.dimensions] == ["engine", "load", "TTFT p99, ms", "cost usd"]
    assert list(drawn.dimensions[0]["values"]) == [0, 0, 1, 1]
    assert list(drawn.dimensions[0].ticktext) == ["a", "b"]
    assert list(drawn.dimensions[2]["values"]) == pytest.approx([100.5, 200.5, 300.5, 400.5])
    assert parallel(grid(load=[1, 2])) is None


def test_panels_are_limited_and_that_is_reported():
    found = grid(load=[1, 2, 3], engine=list("abc"), policy=[f"p{i}" for i in range(30)])
    assert places(found)["facets"] == ["policy"]
    drawing = lines(found, found.metrics[0])
    assert sum("policy" in note.text for note in drawing.layout.annotations) == MAX_PANELS
    assert any(f"{MAX_PANELS} of 30 panels" in caveat for caveat in found.caveats)


def test_the_table_has_intervals_with_seeds_and_says_that_there_is_none_without():
    found = grid(engine=["a", "b"], seed=[0.5, 1.5])
    assert rows(found) == [
        ["engine", "TTFT p99, ms", "cost usd"],
        ["a", "101 ± 6", "1.00"],  # 100 and 101 ms; t = 12.7, standard error 0.5 ms
        ["b", "201 ± 6", "1.00"],
    ]
    assert not found.caveats
    same = table(engine=["a", "b"], seed=range(3)).assign(**{TTFT: [0.1 + 0.2, 0.3, 0.3] * 2})
    assert rows(grid_of(same, ["engine", "seed"], ReportSettings(metrics=(TTFT,)), []))[1][1] == "300"
    alone = grid(engine=["a", "b"])
    assert rows(alone)[1][1] == "100"
    assert alone.caveats[0].startswith("There is only one seed, so there are no confidence")


def test_failed_runs_are_in_no_figure():
    runs = table(load=[1, 2], seed=[0, 1])
    runs.loc[0, ["status", TTFT]] = ["failed", math.nan]
    found = grid_of(runs, ["load", "seed"], ReportSettings(metrics=(TTFT,)), [])
    assert found.cells[(1,)][TTFT].num_values == 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Writes a run with its tables and a sweep, as simulate and sweep leave them."""
    path = tmp_path_factory.mktemp("drawn")
    assert main(["simulate", *SMALL, "replicas=2", "slo=chat", f"hydra.run.dir={path}/run"]) == 0
    own = ["replicas=1,2", "batching=chunked,static", "launcher.jobs=1", f"hydra.run.dir={path}/sweep"]
    assert main(["sweep", *SMALL, *own, "seed=0,1"]) == 0
    return path


def _without_ids(page):
    return re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", page)


@pytest.mark.slow
def test_a_run_is_drawn_again_as_it_was(folders, monkeypatch, capsys):
    before = (folders / "run/report.html").read_text()
    (folders / "run/report.html").unlink()
    monkeypatch.setattr(Scenario, "simulate", None)  # nothing is simulated
    assert main(["report", f"run={folders}/run"]) == 0
    assert capsys.readouterr().out.strip() == f"{folders}/run/report.html"
    assert _without_ids((folders / "run/report.html").read_text()) == _without_ids(before)


def test_a_sweep_is_drawn_as_asked(folders, monkeypatch, capsys):
    monkeypatch.setattr(Scenario, "simulate", None)
    page = folders / "sweep/sweep.html"
    before = page.read_text()
    for heading in ("TTFT p99, ms", "Parallel coordinates", "All configurations"):
        assert f"<h2>{heading}" in before
    assert main(["report", f"sweep={folders}/sweep", "metric=e2e.p50_s", "report.x=batching"]) == 0
    assert "<h2>E2E p50, ms</h2>" in page.read_text()
    assert "<h2>TTFT p99, ms</h2>" not in page.read_text()
    heading, *_ = [line for line in capsys.readouterr().out.splitlines() if "E2E" in line]
    assert heading.split() == ["replicas", "batching", "E2E", "p50,", "ms"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runn=x"], "runn: no such setting; nearest: run"),
        (["run="], "run=: must have a value"),
        (["report.x=load"], "give either run=DIR or sweep=DIR"),
        (["run=a", "sweep=b"], "give either run=DIR or sweep=DIR"),
        (["run=nowhere"], "run=nowhere: no such folder"),
        (["sweep=nowhere"], "sweep=nowhere: no such folder"),
        (["run=RUN", "metric=ttft.p99_s"], "metric=ttft.p99_s: applies to sweeps"),
        (["run=SWEEP"], "is the folder of a sweep; give sweep="),
        (["sweep=RUN"], "it is the folder of a single run"),
        (
            ["run=SWEEP/0"],
            "contains no requests.parquet, iterations.parquet, gaps.parquet, itl.parquet, records.json; ",
        ),
        (["sweep=SWEEP", "report.x=lode"], "report.x=lode: is not an axis of this sweep"),
        (["sweep=SWEEP", "report.format=html,pdf"], "report.format=pdf: no such format"),
    ],
)
def test_report_says_what_it_cannot_draw(arguments, message, folders, capsys):
    words = [a.replace("RUN", f"{folders}/run").replace("SWEEP", f"{folders}/sweep") for a in arguments]
    assert main(["report", *words]) == 2
    assert message in capsys.readouterr().err


DAMAGES = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "other": lambda content: b"[1, 2]",
    "bytes": lambda content: bytes(range(255, 0, -1)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["config.yaml", "summary.json", "records.json", "requests.parquet", "events.parquet"]
)
def test_damaged_files_of_a_run_are_named_in_one_sentence(damage, name, folders, tmp_path, capsys):
    shutil.copytree(folders / "run", tmp_path / "run")
    file = tmp_path / "run" / name
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    commands = {
        "report": ["report", f"run={tmp_path}/run"],
        "explain": ["explain", f"run={tmp_path}/run", "request=0"],
        "dialects": ["dialects", f"run={tmp_path}/run"],
    }
    reads = {
        "config.yaml": ["report"],
        "summary.json": ["report", "explain", "dialects"],
        "records.json": ["report"],
        "requests.parquet": ["report", "explain", "dialects"],
        "events.parquet": ["explain"],
    }
    for command in reads[name]:
        assert main(commands[command]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert name in error


def test_a_damaged_table_of_a_sweep_is_made_again_from_its_runs(folders, tmp_path, capsys):
    shutil.copytree(folders / "sweep", tmp_path / "sweep")
    for content in (b"", b"PAR1", None):
        file = tmp_path / "sweep/runs.parquet"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        assert main(["report", f"sweep={tmp_path}/sweep"]) == 0
    (tmp_path / "sweep/1/summary.json").write_text("{")
    assert main(["sweep", f"resume={tmp_path}/sweep", "launcher.jobs=1"]) == 0
    capsys.readouterr()
    for text in ("", "{", "[]", '{"kind": "windtunnel sweep"}', "[" * 100_000):
        (tmp_path / "sweep/sweep.json").write_text(text)
        assert main(["report", f"sweep={tmp_path}/sweep"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "sweep.json" in error


def test_opening_a_run_executes_nothing_that_it_names(folders, tmp_path, monkeypatch, capsys):
    shutil.copytree(folders / "run", tmp_path / "run")
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nclass RoundRobin: pass\n")
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run/config.yaml"
    text = config.read_text()
    for target in ("trap.RoundRobin", "os.system", "sim.settings.build.get_type_hints"):
        config.write_text(text.replace("policies.routing.load_balancing.LeastOutstanding", target))
        assert main(["report", "run=run"]) == 2
        assert f"routing._target_={target}, which belongs neither to" in capsys.readouterr().err
    assert "trap" not in sys.modules
    assert not (tmp_path / "sprung").exists()
    config.write_text(text.replace("policies.routing.load_balancing.LeastOutstanding", "trap.RoundRobin"))
    assert main(["report", "run=run", "--trust"]) == 2  # imported, and no router
    assert (tmp_path / "sprung").exists()
    assert "(trap.RoundRobin): has no choose" in capsys.readouterr().err


def test_a_sweep_without_a_run_is_not_drawn(tmp_path, capsys):
    plan = Plan(alternatives=(("seed=0", "seed=1"),), axes=())
    about = {"kind": "windtunnel sweep", "begun": "", "code": [], "overrides": [], **plan.to_json()}
    (tmp_path / "sweep.json").write_text(json.dumps(about))
    assert main(["report", f"sweep={tmp_path}"]) == 2
    assert "none of its runs has finished" in capsys.readouterr().err


def test_pictures_say_what_they_need(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(ConfigError, match=r"pip install 'windtunnel\[png\]', and a Chromium"):
        export({"a": go.Figure()}, tmp_path, ["png"])
    assert export({"a": go.Figure()}, tmp_path, []) == []


@pytest.mark.slow
def test_pictures_are_png_and_svg(folders, capsys):
    pytest.importorskip("kaleido")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))):
        pytest.skip("no Chromium on the PATH")
    assert main(["report", f"sweep={folders}/sweep", "metric=ttft.p99_s", "report.format=png,svg"]) == 0
    printed = capsys.readouterr().out
    pictures = sorted((folders / "sweep/figures").iterdir())
    assert [file.name for file in pictures if file.suffix == ".png"] == [
        "lines_ttft.p99_s.png",
        "map_ttft.p99_s.png",
        "parallel_coordinates.png",
    ]
    for file in pictures:
        assert str(file) in printed
        assert file.read_bytes()[:4] == (b"\x89PNG" if file.suffix == ".png" else b"<svg")


def test_pictures_without_a_browser_say_so(monkeypatch, tmp_path):
    pytest.importorskip("kaleido")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nothing"))
    with pytest.raises(
        ConfigError, match=r"^report.format=png: no Chromium or Chrome was found at .*nothing; install one"
    ):
        export({"a": go.Figure()}, tmp_path, ["png"])
