"""The parts of `device_validation` that import torch."""

from __future__ import annotations

from pathlib import Path

from experiments.calibrate.engine.run import (
    check,
    check_model,
    check_same,
    machine_name,
    measure,
    reference_s,
)
from experiments.calibrate.engine.served import architecture_of
from experiments.validate.engine.engine_run import run_on_engine, settings_of, with_memory_of
from experiments.validate.engine.executor_cache import ExecutorCache
from experiments.validate.engine.recording import Recording
from experiments.validate.engine.suite import Case
from experiments.validate.engine.traffic import at_load, exact
from experiments.validate.engine.verdict import Verdict, judge, write_verdict

__all__ = [
    "ExecutorCache",
    "architecture_of",
    "check",
    "check_model",
    "check_same",
    "machine_name",
    "measure",
    "reference_s",
    "run_case",
    "settings_of",
    "write_verdict",
]


def run_case(
    case: Case, executors: ExecutorCache, folder: Path | None = None
) -> tuple[Verdict, list[Recording]]:
    """Runs and judges a case; saves each recording at once. Raises ValueError for unsupported settings."""
    architecture = architecture_of(case.config["model"])
    scenario = with_memory_of(case.scenario, architecture, executors)
    load = case.settings.load
    scenario = exact(scenario) if load is None else at_load(scenario, load)
    recordings = []
    for i in range(case.settings.repeats):
        recordings.append(run_on_engine(scenario, architecture, executors, case.config))
        if folder is not None:
            recordings[-1].save(folder / str(i))
    return judge(case.settings, scenario, recordings, scenario.source()), recordings
