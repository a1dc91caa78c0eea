"""`windtunnel validate against=FILE`: simulates the requests of any engine and compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments.app.terminal import simulated_time
from experiments.simulate.command import OutputSettings
from experiments.study.measured_requests import Replayed
from experiments.validate.fidelity.errors import fidelity_of
from experiments.validate.fidelity.measured import Measured
from experiments.validate.fidelity.metrics import scaled
from experiments.validate.fidelity.printed import print_fidelity, print_files
from experiments.validate.fidelity.recorded_settings import differences
from experiments.validate.fidelity.report import write_validation
from experiments.validate.fidelity.settings import ValidateSettings, split
from experiments.validate.foreign.read import read_runs
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from sim.metrics.result import RunResult
from sim.report.files import write_table
from sim.report.perfetto import write_timeline
from sim.settings.build import build_as
from sim.settings.errors import ConfigError, suggest
from sim.settings.scenario import build_scenario, run
from sim.setup.scenario import Scenario
from sim.workload.distributions import IntArray


@dataclass(frozen=True, slots=True)
class ForeignRun:
    """Settings and measured runs of a validation, all checked before the simulation."""

    settings: ValidateSettings
    scenario: Scenario
    output: OutputSettings
    reals: list[Measured]

    def run(self, config: dict[str, Any], folder: Path, console: Console) -> None:
        """Simulates, compares, writes and prints. Raises ConfigError."""
        scenario, output = self.scenario, self.output
        source = scenario.source()
        with simulated_time(console, source, scenario.sim.until_s, enabled=output.progress) as report:
            result = run(scenario, source, report)
        fidelity = fidelity_of(
            result,
            self.reals,
            trim=scenario.metrics,
            thresholds=self.settings.thresholds,
            slos=scaled(scenario.slo, self.settings.slo_scales),
        )
        notes = notes_of(self, result)
        print_fidelity(fidelity, notes, console)
        title = f"{scenario.model.name} on {scenario.hardware.name}: simulated against measured"
        written = write_validation(
            folder, fidelity, title=title, config=config, notes=notes, page=output.report
        )
        if output.tables:
            write_tables(folder, result, self.reals)
        if output.timeline:
            write_timeline(folder / "timeline.json", result.records, output.timeline_requests)
        print_files(written, console)


def build(cfg: dict[str, Any]) -> ForeignRun:
    """Reads the measured runs and builds the scenario. Raises ConfigError."""
    settings, given = split(cfg)
    scenario = build_scenario(given)
    output = build_as(OutputSettings, cfg["output"], "output")
    reals = read_reals(settings)
    if settings.check_config:
        _check_settings(settings, reals, scenario, given)
    try:
        scenario = replace(scenario, workload=replayed(reals[0]))
        scenario.plan_memory()
        scenario.iteration_model()
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    _check_context(reals[0], scenario)
    return ForeignRun(settings, scenario, output, reals)


def read_reals(settings: ValidateSettings) -> list[Measured]:
    """Returns the chosen runs, repetitions of one workload. Raises ConfigError."""
    reals = [run for file in settings.files for run in _chosen(file, settings.runs)]
    first = reals[0]
    for other in reals[1:]:
        if not np.array_equal(_lengths(first), _lengths(other)):
            raise ConfigError(
                f"against: {first.name} and {other.name} are not repetitions of one workload: their requests "
                "have other lengths, or other ones failed; validate against each one separately"
            )
    return reals


def _lengths(run: Measured) -> IntArray:
    return run.requests[["prompt_tokens", "output_tokens"]].to_numpy(dtype=np.int64)


def _chosen(file: Path, names: Sequence[str]) -> list[Measured]:
    found = read_runs(file)
    for name in names:
        if name not in found:
            raise ConfigError(f"run={name}: no such run in {file}; {suggest(name, found)}")
    if not names and len(found) > 1:
        raise ConfigError(
            f"run: must be given, because {file} contains {len(found)} runs: {', '.join(found)}"
        )
    return [found[name] for name in names or found]


def replayed(real: Measured) -> Replayed:
    """Returns the finished requests as a workload, at their arrival times and with their lengths."""
    answered = (real.requests["status"] == "finished").to_numpy()
    requests = real.requests[answered]
    block_ids: tuple[tuple[int, ...], ...] = ()
    if real.block_ids:
        block_ids = tuple(ids for ids, done in zip(real.block_ids, answered, strict=True) if done)
    return Replayed(
        arrival_s=requests["arrival_s"].to_numpy(dtype=np.float64),
        prompt_tokens=requests["prompt_tokens"].to_numpy(dtype=np.int64),
        output_tokens=requests["output_tokens"].to_numpy(dtype=np.int64),
        block_ids=block_ids,
        block_size=real.block_size,
    )


def _check_settings(
    settings: ValidateSettings, reals: Sequence[Measured], scenario: Scenario, config: Any
) -> None:
    for file in settings.files:
        for real in reals:
            if found := differences(file, real.name, scenario, config):
                raise ConfigError(
                    f"against={file}: was recorded with other settings; add  {' '.join(found)}  "
                    "or check_config=false"
                )


def _check_context(real: Measured, scenario: Scenario) -> None:
    total = (real.requests["prompt_tokens"] + real.requests["output_tokens"]).to_numpy()
    if len(total) and total.max() > scenario.max_model_len:
        row = int(total.argmax())
        raise ConfigError(
            f"against: row {real.requests.get('row', real.requests.index)[row]} has {total[row]:,} tokens, "
            f"prompt plus output; the simulated engine allows {scenario.max_model_len:,}; choose the "
            "recorded model, or raise engine.max_model_len"
        )


def notes_of(validation: ForeignRun, result: RunResult) -> list[str]:
    """Returns the notes on the simulated run."""
    notes = list(result.summary["notes"])
    requests, scenario = result.summary["requests"], validation.scenario
    if missing := requests["arrived"] - requests["finished"]:
        notes.insert(0, f"{missing:,} of {requests['arrived']:,} simulated requests did not finish.")
    trim = scenario.metrics
    if trim.warmup_s or trim.cooldown_s:
        notes.append(
            f"Only requests count that arrived after {trim.known_warmup_s:g} s and more than "
            f"{trim.cooldown_s:g} s before the last one."
        )
    if any("took a request" in note for run in validation.reals for note in run.notes):
        frontend_ms = 1e3 * scenario.engine.idle_frontend_s
        if frontend_ms:
            notes.append(f"Simulated TTFT includes {frontend_ms:g} ms of a frontend (engine.frontend).")
    if scenario.slo is not None:
        limits = scaled(scenario.slo, [1.0])[0].limits
        notes.append(f"SLO {scenario.slo.name}: {limits}; × 2 doubles every limit (slo_scales).")
    if not validation.reals[0].block_ids and isinstance(scenario.caching, PrefixCaching | Radix):
        notes.append(
            "The recording does not say which prompts share a prefix, so the simulated cache has no hits."
        )
    return notes


def write_tables(folder: Path, result: RunResult, reals: Sequence[Measured]) -> None:
    """Writes the requests of all runs and the simulated iterations."""
    write_table(result.requests, folder / "simulated_requests.parquet")
    write_table(result.records.iterations, folder / "simulated_iterations.parquet")
    for i, real in enumerate(reals):
        write_table(real.latencies, folder / f"measured_requests_{i}.parquet")
        if real.iterations is not None:
            write_table(real.iterations, folder / f"measured_iterations_{i}.parquet")
