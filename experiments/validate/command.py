"""`windtunnel validate`: compares the simulator with measurements of a real engine.

device=...     runs the workload on our own engine on this machine: `experiments.validate.engine`
against=...    reads measurements: a recording of our own engine, or the requests of any engine
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from experiments.app.run_folder import write_config
from experiments.app.settings.compose import Composition
from experiments.app.settings.override import Override
from experiments.app.terminal import terminal_console
from experiments.validate.engine import device_validation, recorded_run
from experiments.validate.fidelity.settings import split
from experiments.validate.foreign import run as foreign_run
from sim.settings.errors import ConfigError

DEVICE_KEYS = ("suite", "load", "repeats", "calibrated", "attention_backend")
"""Keys that are valid with device= only, not with against=."""


class Validation(Protocol):
    """One kind of validation, with all settings checked."""

    def run(self, config: dict[str, Any], folder: Path, console: Console) -> None:
        """Simulates, compares, writes and prints. Raises as `Job.run` does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateJob:
    """A validation of any kind."""

    cfg: dict[str, Any]
    validation: Validation

    def run(self, folder: Path) -> None:
        """Runs the validation.

        Raises UnsuccessfulError if our engine and the simulator decided differently.
        """
        config = self.cfg
        write_config(folder, config)
        self.validation.run(config, folder, terminal_console())


def prepare(cfg: dict[str, Any], composition: Composition) -> ValidateJob:
    """Builds the validation. Raises ConfigError for unusable settings or recordings."""
    return ValidateJob(cfg=cfg, validation=_validation(cfg, composition))


def _validation(cfg: dict[str, Any], composition: Composition) -> Validation:
    settings, _ = split(cfg)
    if cfg["metrics"]["warmup_s"] == "auto":
        raise ConfigError(
            "metrics.warmup_s=auto: the measured and the simulated run must drop the same requests; "
            "give seconds, such as metrics.warmup_s=30"
        )
    if settings.device is not None:
        return device_validation.build(settings, cfg, composition)
    for override in composition.overrides:
        if (key := Override.parse(override).root) in DEVICE_KEYS:
            raise ConfigError(
                f"{override}: is valid with device= only; against= reads measurements; remove {key}="
            )
    if all(recorded_run.is_recording(file) for file in settings.files):
        return recorded_run.build(cfg)
    return foreign_run.build(cfg)
