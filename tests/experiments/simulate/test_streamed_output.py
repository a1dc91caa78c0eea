"""Runs of `windtunnel simulate` that write their tables while they go on."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections import namedtuple
from random import Random

import pandas as pd
import pytest

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.simulate.command import SimulateOutput
from sim.cluster import simulation
from sim.metrics.plots import PlotFigures
from sim.report import chunk_tables
from sim.settings.scenario import build_scenario
from sim.setup.streaming import stream

SMALL = ("workload=poisson", "workload.num_requests=60", "replicas=2", "output.progress=false")


def simulate(folder, *arguments):
    return main(["simulate", *SMALL, f"hydra.run.dir={folder}", *arguments])


def titles_of(page):
    return re.findall(r"<section><h2>(.*?)</h2>", page)


def test_rows_and_counts_are_those_of_a_whole_run(tmp_path, capsys):
    whole, streamed = tmp_path / "whole", tmp_path / "streamed"
    assert simulate(whole, "output.report=false") == 0
    assert simulate(streamed, "output.tables=stream") == 0
    tables = [pd.read_parquet(folder / "requests.parquet") for folder in (whole, streamed)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (whole, streamed)]
    for key in ("arrived", "status", "simulated_s", "memory", "workload"):
        if key in summaries[0]:
            assert summaries[0][key] == summaries[1][key]
    assert summaries[0]["throughput"] == pytest.approx(summaries[1]["throughput"], rel=1e-9)
    assert {file.name for file in streamed.iterdir()} == {
        *("config.yaml", "summary.json", "records.json", "report.html"),
        *("requests.parquet", "replicas.parquet", "series.parquet", "plots.bin"),
    }
    capsys.readouterr()
    drawn = (streamed / "report.html").read_text()
    (streamed / "report.html").unlink()
    assert main(["report", f"run={streamed}"]) == 0
    again = (streamed / "report.html").read_text()
    assert titles_of(again) == titles_of(drawn)
    assert {"SLO attainment", "Over time", "Where the time went", "Iterations"} <= set(titles_of(again))
    (streamed / "plots.bin").write_bytes((streamed / "plots.bin").read_bytes()[:100])
    assert main(["report", f"run={streamed}"]) == 2
    assert "plots.bin is damaged or cut short" in capsys.readouterr().err
    (streamed / "plots.bin").unlink()
    assert main(["report", f"run={streamed}"]) == 2
    assert (
        "contains no plots.bin; the run has streamed its tables; simulate it again with output.report=true"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("shards", ["sim.shards=null", "sim.shards=2"])
def test_a_run_without_a_page_adds_up_nothing_for_its_plots(tmp_path, monkeypatch, shards):
    def add(*_):
        raise AssertionError("what the plots show was added up")

    monkeypatch.setattr(PlotFigures, "add", add)
    others = (shards, "launcher=local", "launcher.jobs=1") if shards != "sim.shards=null" else ()
    assert simulate(tmp_path / "run", "output.tables=stream", "output.report=false", *others) == 0
    names = {file.name for file in (tmp_path / "run").iterdir()}
    assert "requests.parquet" in names
    assert not {"plots.bin", "report.html"} & names
    with pytest.raises(AssertionError, match="what the plots show"):
        simulate(tmp_path / "drawn", "output.tables=stream", *others)


@pytest.mark.parametrize(
    ("tables", "command", "message"),
    [
        ("stream", ["explain", "request=0"], "contains no events.parquet; {}output.tables=true, which keeps"),
        ("stream_all", ["explain", "request=0"], "contains no events.parquet; {}output.tables=true, which"),
        (
            "stream",
            ["dialects"],
            "contains no iterations.parquet, gaps.parquet; {}output.tables=stream_all, or",
        ),
        ("stream", ["simulate", "workload=plain_csv"], "requests.parquet: is a folder; name a trace file"),
    ],
)
def test_commands_that_read_a_run_name_the_setting_that_writes_what_they_lack(
    tmp_path, capsys, tables, command, message
):
    run = tmp_path / "run"
    assert simulate(run, f"output.tables={tables}", "output.report=false") == 0
    capsys.readouterr()
    path = f"workload.path={run / 'requests.parquet'}" if command[0] == "simulate" else f"run={run}"
    assert main([*command, path]) == 2
    error = capsys.readouterr().err
    assert message.format("the run has streamed its tables; simulate it again with ") in error
    assert len(error.splitlines()) == 1


def test_a_run_that_streams_all_can_be_drawn_again(tmp_path):
    assert simulate(tmp_path / "run", "output.tables=stream_all") == 0
    assert main(["report", f"run={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_long_runs_stream_by_themselves_and_say_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.simulate.command.STREAMED_ABOVE", 50)
    assert simulate(tmp_path / "run") == 0
    assert (tmp_path / "run" / "requests.parquet").is_dir()
    assert "their rows are written while the run goes on" in " ".join(capsys.readouterr().out.split())
    assert simulate(tmp_path / "timeline", "output.timeline=true", "output.report=false") == 0
    assert (tmp_path / "timeline" / "requests.parquet").is_file()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "output.timeline=true",
            "is made from the tables of the whole run; set output.timeline=false; or set output.tables=true",
        ),
        ("sim.stop_overloaded=true", "sim.stop_overloaded=true: needs the rows of all requests"),
        ("metrics.warmup_s=auto", "metrics.warmup_s=auto:"),
        ("output.tables=some", "output.tables=some:"),
    ],
)
def test_rejects_what_needs_whole_tables(tmp_path, capsys, override, message):
    assert simulate(tmp_path / "run", "output.tables=stream", override) == 2
    assert message in capsys.readouterr().err


def test_rejects_a_disk_without_room_before_the_run(tmp_path, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(chunk_tables.shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    assert simulate(tmp_path / "run", "output.tables=stream") == 2
    assert "the tables of 60 requests take about" in capsys.readouterr().err


def test_a_disk_that_fills_up_ends_the_run_with_what_is_there(tmp_path, capsys, monkeypatch):
    write = chunk_tables.write_whole

    def full(file, content):
        if file.parent.name == "requests.parquet" and file.name != "part-000000.parquet":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        write(file, content)

    monkeypatch.setattr(chunk_tables, "write_whole", full)
    for made in (chunk_tables.ChunkTables.__init__, stream):
        monkeypatch.setitem(made.__kwdefaults__, "group_rows", 16)
    monkeypatch.setattr(simulation, "EVENTS_BETWEEN_REPORTS", 16)
    assert simulate(tmp_path / "run", "output.tables=stream") == 1
    told = capsys.readouterr()
    assert "No space left on device; make room or choose another hydra.run.dir" in told.err
    assert len(told.err.splitlines()) == 1
    assert "TTFT" in told.out
    assert "60 requests" not in told.out
    assert pd.read_parquet(tmp_path / "run" / "requests.parquet")["request_id"].tolist() == list(range(16))


PROGRAM = """
import sys
from pathlib import Path
from sim.report.chunk_tables import ChunkTables
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_run
from sim.setup.streaming import stream
class Reporting(ChunkTables):
    def add(self, chunk):
        print("chunk", flush=True)
        super().add(chunk)
source = ConfigSource(config_name="scenario", dirs=(CONFIG_DIR,))
settings = ["workload=poisson", "workload.num_requests=100000", "replicas=4"]
scenario, traffic = build_run(source.compose(settings))
tables = Reporting(Path(sys.argv[1]), width_s=16.0, group_rows=32)
stream(scenario, traffic, tables, group_rows=32)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_run_leaves_readable_tables(tmp_path, seed):
    random = Random(seed)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        for _ in range(random.randint(3, 12)):
            assert process.stdout.readline() == "chunk\n"
        for _ in range(random.randint(0, 200_000)):  # somewhere in the next chunk
            pass
        os.kill(process.pid, signal.SIGKILL)
    requests = pd.read_parquet(tmp_path / "requests.parquet")
    assert len(requests) >= 32
    assert requests["request_id"].tolist() == list(range(len(requests)))
    assert not len(requests) % 32
    assert (requests["status"] == "finished").all()
    iterations = pd.read_parquet(tmp_path / "iterations.parquet")
    for _, own in iterations.groupby("replica"):
        assert own["iteration"].tolist() == list(range(len(own)))


def test_a_long_run_that_cannot_stream_says_so_and_why():
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    scenario = build_scenario(source.compose(["metrics.warmup_s=auto"]))
    chosen = SimulateOutput()
    assert not chosen.streams(scenario, 10_000_000)
    note = chosen.note(scenario, 10_000_000)
    assert note.startswith("All records stay in memory, about 44 GB for 10,000,000 requests")
    assert "metrics.warmup_s=auto" in note
    assert chosen.note(scenario, 1_000_000) is None


PLOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Identifies a plot; is drawn at random for each page."""


def test_the_page_of_a_run_that_speculates_is_drawn_again(tmp_path):
    run = tmp_path / "run"
    settings = ("speculation=eagle3", "model=llama3_1_8b", "output.tables=stream", "replicas=2")
    assert simulate(run, *settings, "sim.shards=2", "launcher.jobs=1") == 0
    drawn = (run / "report.html").read_text()
    (run / "report.html").unlink()
    assert main(["report", f"run={run}"]) == 0
    again = (run / "report.html").read_text()
    assert PLOT_ID.sub("", again) == PLOT_ID.sub("", drawn)
    assert {"Speculation", "Where the time went"} <= set(titles_of(again))
