"""The benchmark program runs and prints figures; what they are depends on the machine."""

import re

import pytest

from experiments.bench import sim as bench_sim

pytestmark = pytest.mark.slow


def test_prints_cpu_time_memory_and_yardstick_of_a_case(monkeypatch, capsys):
    small = ("workload=poisson", "workload.num_requests=20")
    monkeypatch.setitem(bench_sim.CASES, "a", ("twenty requests", small))
    bench_sim.main(["a", "--in-process", "--repeat=1"])
    line = capsys.readouterr().out
    assert re.fullmatch(r"a +\d+\.\d\d +\d+\.\d +\d+\.\d\d +\d+ +\d+  twenty requests\n", line), line


def test_a_missing_trace_is_not_measured(tmp_path, capsys):
    bench_sim.main(["b", "--in-process", f"--trace={tmp_path}/none.csv"])
    assert capsys.readouterr().out.startswith("b   not measured: no trace at")
