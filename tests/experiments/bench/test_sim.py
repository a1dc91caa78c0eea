"""The benchmark program runs and prints figures; what they are depends on the machine."""

import re

import pytest

from experiments.bench import commands
from experiments.bench import sim as bench_sim

pytestmark = pytest.mark.slow


def test_prints_cpu_time_memory_and_yardstick_of_a_case(monkeypatch, capsys):
    small = ("workload=poisson", "workload.num_requests=20")
    monkeypatch.setitem(bench_sim.CASES, "a", ("twenty requests", small))
    bench_sim.main(["a", "--in-process", "--repeat=1"])
    line = capsys.readouterr().out
    figures = r" +\d+\.\d\d +\d+\.\d +\d+\.\d{3} +\d+ +\d+\.\d\d +\d+"
    assert re.fullmatch(rf"{figures}  twenty requests\n", line), line


def test_a_missing_trace_is_not_measured(tmp_path, capsys):
    bench_sim.main(["b", "--in-process", f"--traces={tmp_path}"])
    assert "not measured, there is no trace" in capsys.readouterr().out


def test_prints_what_a_command_takes_to_start(monkeypatch, capsys):
    monkeypatch.setattr(commands, "STARTS", {"the overview": ("--help",)})
    bench_sim.main(["start", "--repeat=1"])
    assert re.match(r" +\d+\.\d\d CPU s  the overview\n", capsys.readouterr().out)


def test_prints_what_a_study_takes(monkeypatch, capsys):
    words = ("sweep", "workload.num_requests=2", "seed=0,1", "sweep.report=false")
    monkeypatch.setitem(bench_sim.STUDIES, "sweep", ("two runs", words))
    bench_sim.main(["sweep"])
    assert re.fullmatch(r" +\d+\.\d\d CPU s +\d+\.\d\d s  sweep: two runs\n", capsys.readouterr().out)


def test_prints_what_an_update_of_the_dashboard_takes(monkeypatch, capsys):
    monkeypatch.setattr(commands, "CHANGED", {"an update": {"engine": "tgi"}})
    bench_sim.main(["dashboard", "--repeat=1"])
    assert re.fullmatch(r" +\d+\.\d\d CPU s +\d+\.\d\d s  an update\n", capsys.readouterr().out)
