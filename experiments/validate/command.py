"""`windtunnel validate against=FILE`: simulate what was measured, and say how far apart the two are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.build import build_as
from experiments.compose import Composition
from experiments.config_groups import CONFIG_DIR
from experiments.errors import ConfigError, suggest
from experiments.outputs import write_table
from experiments.progress import simulated_time
from experiments.score.per_request import Replayed
from experiments.simulate import OutputSettings, build_scenario
from experiments.terminal import plain_table
from experiments.timeline import write_timeline
from experiments.validate import tables
from experiments.validate.errors import Fidelity, compare
from experiments.validate.foreign import read_runs
from experiments.validate.measured import Measured, of_records
from experiments.validate.metrics import scaled
from experiments.validate.recorded_settings import differences
from experiments.validate.report import write_validation
from experiments.validate.thresholds import Thresholds
from hwmodels.iteration import UnknownIterationError
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from sim.scenario import RunResult, Scenario
from sim.workload.distributions import IntArray

OWN_KEYS = ("against", "run", "thresholds", "slo_scales", "check_config")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateSettings:
    """What `windtunnel validate` has besides the settings of a simulated run."""

    against: str | tuple[str, ...]
    thresholds: Thresholds
    run: str | tuple[str, ...] | None = None
    slo_scales: tuple[float, ...] = (1.0,)
    check_config: bool = True

    def __post_init__(self) -> None:
        for scale in self.slo_scales:
            if not 0 < scale < float("inf"):
                raise ValueError(f"slo_scales={list(self.slo_scales)}: each must be a finite number > 0")
        if len(self.files) > 1 and len(self.runs) > 1:
            raise ValueError("run=[...]: several runs are taken from one file; give against= a single one")

    @property
    def files(self) -> tuple[Path, ...]:
        names = (self.against,) if isinstance(self.against, str) else self.against
        return tuple(Path(name).expanduser() for name in names)

    @property
    def runs(self) -> tuple[str, ...]:
        if self.run is None:
            return ()
        return (self.run,) if isinstance(self.run, str) else self.run


class Validation(NamedTuple):
    """All that is known before anything is simulated."""

    settings: ValidateSettings
    scenario: Scenario
    output: OutputSettings
    reals: list[Measured]


_checked: dict[str, Validation] = {}
"""The settings checked last: a single validation reads its file once, not twice."""


def check(cfg: DictConfig, composition: Composition) -> None:
    """Raises ConfigError for settings and for recordings that cannot be used."""
    _checked.clear()
    _checked[OmegaConf.to_yaml(cfg)] = build_validation(cfg)


def build_validation(cfg: DictConfig) -> Validation:
    """Read what was measured and put the simulated run together. Raises ConfigError."""
    keys = [str(key) for key in cfg if key != "hydra"]
    settings: ValidateSettings = build_as(
        ValidateSettings, OmegaConf.masked_copy(cfg, [key for key in keys if key in OWN_KEYS]), ""
    )
    given = OmegaConf.masked_copy(cfg, [key for key in keys if key not in OWN_KEYS])
    scenario = build_scenario(given)
    output = build_as(OutputSettings, cfg.output, "output")
    reals = read_reals(settings)
    if settings.check_config:
        _check_settings(settings, reals, scenario, OmegaConf.to_container(given, resolve=True))
    try:
        scenario = replace(scenario, workload=replayed(reals[0]))
        scenario.plan_memory()
        scenario.iteration_model()
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    _check_context(reals[0], scenario)
    return Validation(settings, scenario, output, reals)


def read_reals(settings: ValidateSettings) -> list[Measured]:
    """The chosen runs, repetitions of one workload. Raises ConfigError."""
    reals = [run for file in settings.files for run in _chosen(file, settings.runs)]
    first = reals[0]
    for other in reals[1:]:
        if not np.array_equal(_lengths(first), _lengths(other)):
            raise ConfigError(
                f"against: {first.name} and {other.name} are not repetitions of one workload: their requests "
                "have other lengths, or other ones failed; validate against each alone"
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
        raise ConfigError(f"run: must be given, {file} has {len(found)}: {', '.join(found)}")
    return [found[name] for name in names or found]


def replayed(real: Measured) -> Replayed:
    """The requests that were answered, at the times at which they came, with their lengths."""
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
            f"prompt and answer together; the simulated engine takes {scenario.max_model_len:,}: choose the "
            "recorded model, or raise engine.max_model_len"
        )


def fidelity_of(validation: Validation, result: RunResult) -> Fidelity:
    """Compare a simulated run with the measured ones, over the part that is measured."""
    trim = validation.scenario.metrics
    runs = [
        run.trimmed(warmup_s=trim.warmup_s, cooldown_s=trim.cooldown_s)
        for run in (of_records(result.records), *validation.reals)
    ]
    return compare(
        runs[0],
        runs[1:],
        thresholds=validation.settings.thresholds,
        slos=scaled(validation.scenario.slo, validation.settings.slo_scales),
        model=result.model,
    )


def notes_of(validation: Validation, result: RunResult) -> list[str]:
    """What a reader must know of the simulated side."""
    notes = list(result.summary["notes"])
    requests, scenario = result.summary["requests"], validation.scenario
    if missing := requests["arrived"] - requests["finished"]:
        notes.insert(0, f"{missing:,} of {requests['arrived']:,} simulated requests were not answered.")
    trim = scenario.metrics
    if trim.warmup_s or trim.cooldown_s:
        notes.append(
            f"Only requests are measured that arrived after {trim.warmup_s:g} s and more than "
            f"{trim.cooldown_s:g} s before the last one."
        )
    if any("took a request" in note for run in validation.reals for note in run.notes):
        frontend_ms = 1e3 * scenario.engine.frontend_s
        if frontend_ms:
            notes.append(f"Simulated TTFT has {frontend_ms:g} ms of a frontend (engine.frontend_s) in it.")
    if scenario.slo is not None:
        limits = scaled(scenario.slo, [1.0])[0].limits
        notes.append(f"SLO {scenario.slo.name}: {limits}; × 2 doubles every limit (slo_scales).")
    if not validation.reals[0].block_ids and isinstance(scenario.caching, PrefixCaching | Radix):
        notes.append("The recording does not say which prompts share a prefix: none is found in the cache.")
    return notes


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="validate")
def main(cfg: DictConfig) -> None:
    """Simulate, compare, write, print."""
    key = OmegaConf.to_yaml(cfg)
    validation = _checked.pop(key) if key in _checked else build_validation(cfg)
    scenario, output, console = validation.scenario, validation.output, Console()
    if not console.is_terminal:
        console.width = 100  # a file or a pipe: what the tables were made for
    source = scenario.source()
    with simulated_time(console, source, scenario.sim.until_s, enabled=output.progress) as report:
        try:
            result = scenario.run(source, report)
        except UnknownIterationError as error:
            raise ConfigError(f"latency: {error}") from error
    fidelity = fidelity_of(validation, result)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    folder = Path(HydraConfig.get().runtime.output_dir)
    notes = notes_of(validation, result)
    title = f"{scenario.model.name} on {scenario.hardware.name}: simulated against measured"
    written = write_validation(folder, fidelity, title=title, config=config, notes=notes, page=output.report)
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    if output.tables:
        write_table(result.requests, folder / "simulated_requests.parquet")
        write_table(result.records.iterations, folder / "simulated_iterations.parquet")
        for i, real in enumerate(validation.reals):
            write_table(real.latencies, folder / f"measured_requests_{i}.parquet")
    if output.timeline:
        write_timeline(folder / "timeline.json", result.records, output.timeline_requests)
    print_fidelity(fidelity, notes, console)
    for file in written:
        shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        console.print(str(shown), style="dim", soft_wrap=True, highlight=False)


def print_fidelity(fidelity: Fidelity, notes: Sequence[str], console: Console) -> None:
    """The verdict, the errors, and what there is to know."""
    colour = {"met": "bold green", "missed": "bold red"}.get(fidelity.verdict, "bold")
    console.print(tables.verdict_line(fidelity), style=colour, highlight=False)
    console.print(plain_table(tables.metric_rows(fidelity)))
    if fidelity.curves:
        console.print(plain_table(tables.curve_rows(fidelity.curves)))
    if fidelity.iterations:
        console.print(plain_table(tables.kind_rows(fidelity.iterations)))
    for note in dict.fromkeys([*notes, *(note for run in fidelity.reals for note in run.notes)]):
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
