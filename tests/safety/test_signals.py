"""SIGTERM is handled as Ctrl-C: partial answers are kept, processes end, and soon."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.reproduce.findings import known
from experiments.study.launchers.local import Local
from sim.engine.clock import Interrupt

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
MODEL = ("model=smollm2_135m", "hardware=l4")
LONG = ("simulate", *MODEL, "workload.num_requests=3000000", "hydra.run.dir=out")
pytestmark = pytest.mark.slow
ENDS_WITHIN_S = 10
"""A stop takes 2 to 3 s on a quiet machine; tests share theirs."""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def started(*words, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.app.cli", *words],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **more,
    )


def group_of(process):
    """Returns the processes of the session that a command has started, itself included."""
    listed = subprocess.run(["ps", "-o", "pid=", "-s", str(process.pid)], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def wait_for(condition, timeout_s=120):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)


def ended(process, how):
    """Sends a signal; returns (exit code, seconds until the end, output, errors)."""
    begun = time.monotonic()
    os.kill(process.pid, how)
    printed, error = process.communicate(timeout=60)
    return process.returncode, time.monotonic() - begun, printed, error


@pytest.mark.parametrize(
    ("how", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_simulation_keeps_its_partial_result(how, code, word):
    process = started(
        "simulate", "model=smollm2_135m", "hardware=l4", "workload.num_requests=3000000", "hydra.run.dir=out"
    )
    wait_for(lambda: Path("out").is_dir())
    time.sleep(1.0)
    found, seconds, printed, error = ended(process, how)
    assert (found, error) == (code, f"windtunnel: {word}\n")
    assert seconds < ENDS_WITHIN_S + 20  # what was simulated is measured and written
    assert "TTFT" in printed
    assert json.loads(Path("out/summary.json").read_text())["interrupted"]


@pytest.mark.parametrize(
    "words",
    [
        ["goodput", "goodput.jobs=2", "goodput.requests=100000"],
        ["sweep", "seed=range(0,8)", "launcher.jobs=2", "workload.num_requests=1000000", "hydra.run.dir=out"],
    ],
    ids=["goodput", "sweep"],
)
def test_studies_end_soon_and_leave_no_process(words):
    process = started(*words, *MODEL)
    wait_for(lambda: len(group_of(process)) >= 2)
    time.sleep(2.0)
    code, seconds, _, error = ended(process, signal.SIGTERM)
    assert (code, error.splitlines()[-1]) == (143, "windtunnel: terminated")
    assert seconds < ENDS_WITHIN_S
    wait_for(lambda: not group_of(process), 10)


def measured_requests():
    """Writes a CSV of measured requests whose simulation takes a minute."""
    arrival_s = np.arange(600_000) / 100
    times = {"arrival_s": arrival_s, "first_token_s": arrival_s + 0.1, "last_token_s": arrival_s + 1.0}
    pd.DataFrame({**times, "input_tokens": 64, "output_tokens": 32}).to_csv("measured.csv", index=False)


ENDLESS = ("workload.num_requests=3000000", "hydra.run.dir=out")
STUDIES = {
    "validate": ("validate", "against=measured.csv", *MODEL, "hydra.run.dir=out"),
    "goodput": ("goodput", "goodput.requests=null", "goodput.jobs=1", *MODEL, *ENDLESS),
    "capacity": (
        *("capacity", "capacity.jobs=1", "capacity.hardware=[]", "capacity.window_s=null"),
        *("capacity.tensor_parallel_sizes=[1]", *MODEL, *ENDLESS),
    ),
    "compare": (
        *("compare", "experiment=prefill_decode_interference", "jobs=1", "hydra.run.dir=out"),
        "also=['workload.num_requests=200000']",
    ),
    "whatif": ("whatif", "whatif.jobs=1", "whatif.requests=null", *MODEL, *ENDLESS),
    "sweep": ("sweep", "seed=0,1", "launcher.jobs=1", *MODEL, *ENDLESS),
    "reproduce": ("reproduce", "jobs=1", "cache=null", "hydra.run.dir=out"),
}
"""Studies whose runs are made one after the other in the process that gets the signal."""


@pytest.mark.sampled(slow=3)
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_ends_at_the_first_signal_and_uses_no_run_that_was_cut(name):
    measured_requests()
    process = started(*STUDIES[name])
    wait_for(lambda: Path("out").is_dir())
    time.sleep(3.0)
    code, seconds, printed, error = ended(process, signal.SIGTERM)
    assert (code, error.splitlines()[-1]) == (143, "windtunnel: terminated"), error
    # A computed row of the gallery ends first, and then the gallery is drawn.
    assert seconds < ENDS_WITHIN_S + 50 * (name == "reproduce")
    if name == "reproduce":  # rows that were whole have their figures, perhaps of fewer seeds
        rows = json.loads(Path("out/summary.json").read_text())["rows"]
        means = {row["row"]: row["ours"] and row["ours"]["mean"] for row in rows if row["row"] in known()}
        found = {row: mean for row, mean in means.items() if mean is not None}
        assert found == pytest.approx({row: known()[row][0].ours for row in found}, rel=0.05)
        assert len(found) < len(means)
    else:  # no figure of the run that was cut
        assert "TTFT" not in printed
    assert not list(Path("out").rglob("validation.json"))


def test_sigterm_ends_a_command_whose_shell_ignores_ctrl_c():
    process = started(
        *(
            "simulate",
            "model=smollm2_135m",
            "hardware=l4",
            "workload.num_requests=3000000",
            "hydra.run.dir=out",
        ),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    wait_for(lambda: Path("out").is_dir())
    time.sleep(1.0)
    assert ended(process, signal.SIGTERM)[0] == 143


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_the_dashboard_takes_its_workers_along(how):
    pytest.importorskip("dash", reason="dash is not installed: pip install 'windtunnel[dashboard]'")
    process = started("dashboard", "--port", "8431", "model=smollm2_135m", "hardware=l4")
    assert process.stdout.readline().startswith("http://127.0.0.1:8431")
    wait_for(lambda: len(group_of(process)) >= 2)
    _, seconds, *_ = ended(process, how)
    assert seconds < ENDS_WITHIN_S
    wait_for(lambda: not group_of(process), 15)


def sleep(seconds):
    time.sleep(seconds)


def test_running_tasks_are_given_a_moment_and_then_killed():
    interrupt = Interrupt()
    outcomes = Local(jobs=2).outcomes(sleep, [0.01, 60.0, 60.0, 60.0], interrupt)
    assert next(outcomes).index == 0
    interrupt.noted = True
    begun = time.monotonic()
    assert list(outcomes) == []
    assert time.monotonic() - begun < ENDS_WITHIN_S
