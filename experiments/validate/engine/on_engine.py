"""The parts of `device_validation` that import torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from experiments.calibrate.engine.run import (
    check,
    check_model,
    check_same,
    machine_name,
    measure,
    reference_of,
)
from experiments.calibrate.engine.served import architecture_of
from experiments.validate.engine.engine_run import run_on_engine, settings_of, with_memory_of
from experiments.validate.engine.executor_cache import ExecutorCache
from experiments.validate.engine.noise import quiet_runs
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
    "reference_of",
    "run_case",
    "settings_of",
    "write_verdict",
]


def run_case(
    case: Case, executors: ExecutorCache, save: Callable[[Recording, int], None] | None = None
) -> tuple[Verdict, list[Recording]]:
    """Runs and judges a case. Raises ValueError for unsupported settings.

    save: is called with each recording and its number, as soon as it is complete. A run is repeated if the
    machine was too noisy, see `quiet_runs`.
    """
    architecture = architecture_of(case.config["model"])
    scenario = with_memory_of(case.scenario, architecture, executors, case.config)
    load = case.settings.load
    scenario = exact(scenario) if load is None else at_load(scenario, load)
    recordings: list[Recording] = []
    run = partial(run_on_engine, scenario, architecture, executors, case.config)
    for recording in quiet_runs(run, case.settings.repeats):
        if save is not None:
            save(recording, len(recordings))
        recordings.append(recording)
    return judge(case.settings, scenario, recordings, scenario.source()), recordings
