"""`windtunnel validate`: compares the simulator with measurements of a real engine.

device=...     our own engine runs the workload on this machine: `experiments.validate.engine`
against=...    what was measured: a recording of our own engine, or anybody's requests
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig
from rich.console import Console

from experiments.app.run_folder import resolved_config, write_config
from experiments.app.terminal import terminal_console
from experiments.validate.engine import device_validation, recorded_run
from experiments.validate.fidelity.settings import split
from experiments.validate.foreign import run as foreign_run
from sim.settings.compose import Composition
from sim.settings.errors import ConfigError
from sim.settings.override import Override

DEVICE_KEYS = ("suite", "load", "repeats", "calibrated")
"""Keys that go with device= only, not with against=."""


class Validation(Protocol):
    """One way to validate, all of it checked."""

    def run(self, config: dict[str, Any], folder: Path, console: Console) -> None:
        """Simulate, compare, write, print. Raises as `Job.run` does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateJob:
    """A validation of any kind."""

    cfg: DictConfig
    validation: Validation

    def run(self, folder: Path) -> None:
        """Raises UnsuccessfulError if our engine decided otherwise than the simulator."""
        config = resolved_config(self.cfg)
        write_config(folder, config)
        self.validation.run(config, folder, terminal_console())


def prepare(cfg: DictConfig, composition: Composition) -> ValidateJob:
    """Raises ConfigError for settings and for recordings that cannot be used."""
    return ValidateJob(cfg=cfg, validation=_validation(cfg, composition))


def _validation(cfg: DictConfig, composition: Composition) -> Validation:
    settings, _ = split(cfg)
    if cfg.metrics.warmup_s == "auto":
        raise ConfigError(
            "metrics.warmup_s=auto: what was measured and what is simulated must lose the same requests; "
            "give seconds, such as metrics.warmup_s=30"
        )
    if settings.device is not None:
        return device_validation.build(settings, cfg, composition)
    for override in composition.overrides:
        if (key := Override.parse(override).root) in DEVICE_KEYS:
            raise ConfigError(
                f"{override}: goes with device=; against= takes what was measured; leave {key}= out"
            )
    if all(recorded_run.is_recording(file) for file in settings.files):
        return recorded_run.build(cfg)
    return foreign_run.build(cfg)
