"""`windtunnel validate against=FOLDER`: compares the simulator with a recording of our own engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments.simulate.command import OutputSettings
from experiments.validate.engine.acceptances import check_written, write_measured
from experiments.validate.engine.from_recording import until_s
from experiments.validate.engine.recording import Recording, load
from experiments.validate.engine.swapped import RecordedSource
from experiments.validate.engine.verdict import check_success, judge, write_verdict
from experiments.validate.fidelity.printed import print_files
from experiments.validate.fidelity.recorded_settings import config_differences, deciding
from experiments.validate.fidelity.settings import ValidateSettings, split
from sim.metrics.slo import check_no_workload_terms
from sim.report.files import config_digest
from sim.settings.build import build_as
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario
from sim.setup.scenario import Scenario


def is_recording(folder: Path) -> bool:
    """Returns whether a folder is a recording of our own engine."""
    return (folder / "recording.json").is_file()


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Settings and recordings of a validation, all checked before the simulation."""

    settings: ValidateSettings
    scenario: Scenario
    output: OutputSettings
    recordings: list[Recording]

    def run(self, config: dict[str, Any], folder: Path, console: Console) -> None:
        """Replays, simulates, compares, writes and prints."""
        source = RecordedSource(self.recordings[0], as_seen=False)
        verdict = judge(self.settings, self.scenario, self.recordings, source)
        verdict.print(console)
        if self.settings.write_acceptance is not None:
            write_measured(self.settings.write_acceptance, self.recordings, self.scenario)
        written = write_verdict(
            folder,
            verdict,
            title=f"{self.scenario.model.name}: simulated against a recording of our engine",
            config=config,
            recordings=self.recordings,
            page=self.output.report,
            tables=self.output.tables,
        )
        print_files(written, console)
        check_success([verdict])


def build(cfg: dict[str, Any]) -> RecordedRun:
    """Reads the recordings and builds the scenario. Raises ConfigError."""
    settings, given = split(cfg)
    scenario = build_scenario(given)
    output: OutputSettings = build_as(OutputSettings, cfg["output"], "output")
    recordings = []
    for folder in settings.files:
        try:
            recording = load(folder)
        except ValueError as error:
            raise ConfigError(f"against={error}") from error
        if settings.check_config:
            _check_config(folder, recording, given)
        recordings.append(recording)
    _check_repetitions(settings, recordings)
    try:
        check_no_workload_terms(scenario.slo, "a recording")
        check_written(settings.write_acceptance, [scenario])
        scenario = as_recorded(scenario, recordings[0])
        scenario.plan_memory()
        scenario.iteration_model()
        RecordedSource(recordings[0], as_seen=False)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    return RecordedRun(settings, scenario, output, recordings)


def as_recorded(scenario: Scenario, recording: Recording) -> Scenario:
    """Returns the scenario with the engine's KV blocks, up to the end of a truncated recording."""
    blocks = int(recording.engine["num_kv_blocks"])
    scenario = replace(scenario, engine=replace(scenario.engine, num_kv_blocks=blocks))
    if recording.is_whole:
        return scenario
    return replace(scenario, sim=replace(scenario.sim, until_s=until_s(recording)))


def _check_config(folder: Path, recording: Recording, given: dict[str, Any]) -> None:
    """Raises ConfigError if the recording's config is damaged or differs from the given one."""
    about = recording.engine
    if "config" not in about:
        raise ConfigError(
            f"against={folder}: recording.json contains no config to compare; check the "
            "settings yourself and add check_config=false"
        )
    recorded, given = about["config"], deciding(given)
    if config_digest(recorded) != about["config_digest"]:
        raise ConfigError(f"against={folder}: recording.json: its config was changed after the recording")
    if about["config_digest"] != config_digest(given):
        found = " ".join(config_differences(recorded, given))
        raise ConfigError(
            f"against={folder}: was recorded with other settings; add  {found}  or check_config=false"
        )


def _check_repetitions(settings: ValidateSettings, recordings: Sequence[Recording]) -> None:
    columns = ["prompt_tokens", "output_tokens"]
    first = recordings[0].requests[columns].to_numpy()
    for folder, other in zip(settings.files[1:], recordings[1:], strict=True):
        if not np.array_equal(first, other.requests[columns].to_numpy()):
            raise ConfigError(
                f"against: {folder} is not a repetition of {settings.files[0]}: its requests have other "
                "lengths; validate against each one separately"
            )
