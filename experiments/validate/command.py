"""`windtunnel validate`: how far apart are the simulated world and a real one?

device=...     our own engine flies the workload on this machine: `experiments.validate.engine`
against=...    what was measured: a recording of our own engine, or anybody's requests
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.app.terminal import terminal_console
from experiments.validate.engine import flown_run, recorded_run
from experiments.validate.fidelity.settings import split
from experiments.validate.foreign import run as foreign_run
from sim.settings.compose import Composition, ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.override import Override


class Validation(Protocol):
    """All of it checked, nothing run."""

    def run(self, cfg: DictConfig, folder: Path, console: Console) -> None:
        """Simulate, compare, write, print. Raises ConfigError."""


FLOWN_KEYS = ("suite", "load", "repeats", "calibrated")
"""Of no use with against=."""

_checked: dict[str, Validation] = {}
"""The settings checked last: a single validation reads its files once, not twice."""

_told: list[ConfigError] = []
"""What was found to be wrong while running."""


def check(cfg: DictConfig, composition: Composition) -> None:
    """Raises ConfigError for settings and for recordings that cannot be used."""
    _checked.clear()
    _checked[OmegaConf.to_yaml(cfg)] = _validation(cfg, composition)


def _validation(cfg: DictConfig, composition: Composition) -> Validation:
    settings, _ = split(cfg)
    if cfg.metrics.warmup_s == "auto":
        raise ConfigError(
            "metrics.warmup_s=auto: what was measured and what is simulated must lose the same requests; "
            "give seconds, such as metrics.warmup_s=30"
        )
    if settings.device is not None:
        return flown_run.build(settings, cfg, composition)
    for override in composition.overrides:
        if (key := Override.parse(override).root) in FLOWN_KEYS:
            raise ConfigError(
                f"{override}: goes with device=; against= takes what was measured; leave {key}= out"
            )
    if all(recorded_run.is_recording(file) for file in settings.files):
        return recorded_run.build(cfg)
    return foreign_run.build(cfg)


def main() -> None:
    """Run what was checked. Raises ConfigError, the first one of a multirun."""
    _told.clear()
    _run()
    if _told:
        raise _told[0]


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="validate")
def _run(cfg: DictConfig) -> None:
    try:
        _validate(cfg)
    except ConfigError as error:  # Hydra would write more than the message
        _told.append(error)


def _validate(cfg: DictConfig) -> None:
    hydra_cfg, key = HydraConfig.get(), OmegaConf.to_yaml(cfg)
    folder, overrides = Path(hydra_cfg.runtime.output_dir), list(hydra_cfg.overrides.task)
    folders = [Path(one.path) for one in hydra_cfg.runtime.config_sources if one.schema == "file"]
    console = terminal_console()
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()  # cases are composed from here on
    try:
        source = ConfigSource(config_name="validate", dirs=list(dict.fromkeys([CONFIG_DIR, *folders])))
        validation = (
            _checked.pop(key) if key in _checked else _validation(cfg, Composition(source, overrides))
        )
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
        validation.run(cfg, folder, console)
    finally:
        GlobalHydra.instance().hydra = state  # a multirun goes on with it
