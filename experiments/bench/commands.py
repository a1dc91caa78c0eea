"""What whole commands take: their start, studies of many runs, and an answer of the dashboard."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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
        "1,000 runs of 10 to 50 requests: two engines, five lengths, 100 seeds",
        ("sweep", "engine=vllm,tgi", "workload.num_requests=10,20,30,40,50", "seed=range(0,100)"),
    ),
    "capacity": (
        "200 candidates: five GPUs, TP 1 to 8, five engines, two formats; three seeds",
        (
            "capacity",
            "capacity.tensor_parallel_sizes=[1,2,4,8]",
            "capacity.engines=[vllm,sglang,tgi,orca,tensorrt_llm]",
        ),
    ),
    "goodput": (
        "the curves of four engines at twelve rates, three seeds",
        ("goodput", "goodput.arms=['engine=vllm','engine=sglang','engine=tgi','engine=orca']"),
    ),
}
"""Name -> what it is, its command line."""

DASHBOARD = "dashboard"
TURNED: dict[str, dict[str, float | str]] = {
    "an answer of the dashboard, 2,000 requests": {"workload.arrivals.rate_per_s": 7.0},
    "the same for an engine not asked for before": {"engine": "sglang"},
}
"""The settings that are changed before each timed answer, starting from the defaults."""


class Took(NamedTuple):
    """Seconds that a process took, its own processes included."""

    cpu_s: float
    wall_s: float


def time_starts(repeat: int) -> None:
    """Print a line a command: CPU seconds of its process."""
    for name, words in STARTS.items():
        best_s = min(_command(words).cpu_s for _ in range(repeat))
        print(f"{best_s:7.2f} CPU s  {name}", flush=True)


def time_study(name: str) -> None:
    """Print one line: CPU seconds of all processes, and the time until the command was done."""
    what, words = STUDIES[name]
    took = _command(words)
    print(f"{took.cpu_s:7.2f} CPU s {took.wall_s:7.2f} s  {name}: {what}", flush=True)


def time_dashboard(repeat: int) -> None:
    """Print a line a question: the time until it is answered, without the browser. CPU and wall seconds."""
    for what, turned in TURNED.items():
        best = min(_answered(turned) for _ in range(repeat))
        print(f"{best.cpu_s:7.2f} CPU s {best.wall_s:7.2f} s  {what}", flush=True)


def _command(words: Sequence[str]) -> Took:
    """A command, which may fail; what it writes is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        writes = words[0] in ("simulate", *STUDIES) and words[-1] != "--help"
        here = [f"hydra.run.dir={folder}/run"] if writes else []
        before, begun_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([*WINDTUNNEL, *words, *here], capture_output=True, check=False)
        wall_s, after = time.perf_counter() - begun_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Took(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s)


def _answered(turned: dict[str, float | str]) -> Took:
    """The first answer of a dashboard to that, which is warm otherwise."""
    service = SimulationService(build_board(None, []), curves=False)
    service.warm()
    state = {**service.board.defaults, **turned}
    begun_cpu_s, begun_s = time.process_time(), time.perf_counter()
    service.answer("bench", state)
    return Took(time.process_time() - begun_cpu_s, time.perf_counter() - begun_s)
