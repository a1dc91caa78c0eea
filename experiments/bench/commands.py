"""Times of whole commands: their start, studies of many runs, and one update of the dashboard."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.dashboard.command import build_board
from experiments.dashboard.simulation_service import SimulationService

WINDTUNNEL = (sys.executable, "-c", "import sys; from experiments.app.cli import main; sys.exit(main())")
STARTS = {
    "windtunnel --help": ("--help",),
    "windtunnel simulate --help": ("simulate", "--help"),
    "windtunnel list": ("list",),
    "a misspelt key": ("simulate", "workload.nume_requests=10"),
    "ten requests, no report": ("simulate", "workload.num_requests=10", "output.report=false"),
    "ten requests": ("simulate", "workload.num_requests=10"),
}
STUDIES = {
    "sweep": (
        "1,000 runs of 10 to 50 requests: two engines, five numbers of requests, 100 seeds",
        ("sweep", "engine=vllm,tgi", "workload.num_requests=10,20,30,40,50", "seed=range(0,100)"),
    ),
    "capacity": (
        "200 candidates: five GPUs, TP 1 to 8, five engines, two weight formats; three seeds",
        (
            "capacity",
            "capacity.tensor_parallel_sizes=[1,2,4,8]",
            "capacity.engines=[vllm,sglang,tgi,orca,tensorrt_llm]",
        ),
    ),
    "goodput": (
        "four engines at twelve request rates, three seeds",
        ("goodput", "goodput.arms=['engine=vllm','engine=sglang','engine=tgi','engine=orca']"),
    ),
}
"""Study -> (description, command line)."""

DASHBOARD = "dashboard"
CHANGED: dict[str, dict[str, float | str]] = {
    "dashboard: another request rate, 2,000 requests": {"workload.arrivals.rate_per_s": 7.0},
    "dashboard: another engine, first time": {"engine": "sglang"},
}
"""Description -> the settings that are changed from the defaults before a timed update."""


class Took(NamedTuple):
    """Time in seconds that a process took, including its child processes."""

    cpu_s: float
    wall_s: float
    error: str | None = None
    """The last line that a command wrote before it ended with an error; None: it did not."""


def time_starts(repeat: int) -> None:
    """Prints one line per command with the CPU seconds of its process, the fastest of `repeat` runs."""
    for name, words in STARTS.items():
        best_s = min(_command(words).cpu_s for _ in range(repeat))
        print(f"{best_s:7.2f} CPU s  {name}", flush=True)


def time_study(name: str) -> None:
    """Prints the CPU seconds of a study, over all its processes, and its wall time in seconds."""
    description, words = STUDIES[name]
    took = _command(words)
    print(f"{took.cpu_s:7.2f} CPU s {took.wall_s:7.2f} s  {name}: {description}", flush=True)


def time_dashboard(repeat: int) -> None:
    """Prints the CPU and wall seconds of updates of the dashboard, without the browser."""
    for description, changed in CHANGED.items():
        best = min(_update(changed) for _ in range(repeat))
        print(f"{best.cpu_s:7.2f} CPU s {best.wall_s:7.2f} s  {description}", flush=True)


def timed(command: Sequence[str], where: Path | None = None, **environment: str) -> Took:
    """Times a command, the output of which is discarded, in the folder `where`; None: the current one."""
    before, begun_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=where,
        env={**os.environ, **environment},
    )
    wall_s, after = time.perf_counter() - begun_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    return Took(cpu_s, wall_s, last if done.returncode else None)


def run_in(checkout: Path, words: Sequence[str]) -> Took:
    """Times a command of the windtunnel in a checkout."""
    return timed([*WINDTUNNEL, *words], checkout, PYTHONPATH=str(checkout))


def _command(words: Sequence[str]) -> Took:
    """Times a command, which may fail; what it writes is removed."""
    with tempfile.TemporaryDirectory() as folder:
        writes = words[0] in ("simulate", *STUDIES) and words[-1] != "--help"
        here = [f"hydra.run.dir={folder}/run"] if writes else []
        return timed([*WINDTUNNEL, *words, *here])


def _update(changed: dict[str, float | str]) -> Took:
    """Times the first update of a warm dashboard after settings were changed."""
    service = SimulationService(build_board(None, []), curves=False)
    service.warm()
    state = {**service.board.defaults, **changed}
    begun_cpu_s, begun_s = time.process_time(), time.perf_counter()
    service.answer("bench", state)
    return Took(time.process_time() - begun_cpu_s, time.perf_counter() - begun_s)
