"""The cases of a validation, each with the settings of a run, composed as on the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from experiments.app.settings.compose import Composition, ConfigSource, resolved
from experiments.app.settings.hydra_errors import composed
from experiments.app.settings.override import Override, not_about
from experiments.calibrate.engine.files import Files
from experiments.validate.fidelity.settings import Suite, ValidateSettings, split
from hwmodels.model import ModelSpec
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario
from sim.setup.scenario import Scenario

MEASURED_GROUPS = ("hardware", "calibration", "latency", "engine")
"""Config groups that the machine decides, and neither the command line nor a case."""

DEVICE_DEFAULTS = {"cpu": ("model=random_8m", "thresholds=cpu"), "cuda": ("thresholds=gpu",)}


class Case(NamedTuple):
    """One case of a suite. config: the resolved configuration."""

    name: str
    settings: ValidateSettings
    scenario: Scenario
    config: dict[str, Any]


def cases_of(composition: Composition, suite: Suite, device: str, calibrated: Files | None) -> list[Case]:
    """Returns all cases on the calibrated machine; None: on the default one, to check the settings.

    Raises ConfigError with the name of the case.
    """
    given = not_about(composition.overrides, "hydra")
    _check_unmeasured(given, device)
    source, measured = composition.source, list[str]()
    if calibrated is not None:
        folder = calibrated.hardware.parents[1].resolve()
        source = ConfigSource(config_name=source.config_name, dirs=[*source.dirs, folder])
        measured = [
            f"{file.parent.name}={file.stem}"
            for file in (calibrated.hardware, calibrated.engine, calibrated.latency)
        ]
    found = []
    for name, own in suite.cases.items():
        try:
            _check_unmeasured([*suite.base, *own], device)
            cfg = composed(source, _merged([measured, DEVICE_DEFAULTS[device], suite.base, given, own]))
            if device == "cpu":
                _use_default_dtype(cfg)
            found.append(_case(name, resolved(cfg)))
        except ConfigError as error:
            where = f"case {name}: " if len(suite.cases) > 1 else ""
            raise ConfigError(f"{where}{error}") from error
    return found


def _use_default_dtype(cfg: DictConfig) -> None:
    """Sets data types that are left open, of the model and of draft models, to the engine's on a CPU."""
    several = OmegaConf.select(cfg, "speculation.draft.drafts") or {}
    drafts = [OmegaConf.select(cfg, "speculation.draft.model"), *(one.model for one in several.values())]
    for node in (cfg.model, *drafts):
        if node is not None and node.get("dtype") == "auto":
            node.dtype = "fp32"


def model_of(cases: Sequence[Case]) -> ModelSpec:
    """Returns the model of all cases. Raises ConfigError if they differ, because one table is measured."""
    first = cases[0].scenario.model
    for case in cases[1:]:
        if case.scenario.model != first:
            raise ConfigError(f"case {case.name}: model: must be the same in all cases")
    return first


def _case(name: str, cfg: dict[str, Any]) -> Case:
    settings, given = split(cfg)
    return Case(name, settings, build_scenario(given), cfg)


def _check_unmeasured(overrides: Sequence[str], device: str) -> None:
    """Raises ConfigError for overrides of settings that the machine decides."""
    for override in overrides:
        if (key := Override.parse(override).key) in MEASURED_GROUPS:
            raise ConfigError(
                f"{override}: device={device} is measured; remove {key}= (single settings such as "
                "engine.max_num_seqs=8 are allowed)"
            )


def _merged(layers: Iterable[Sequence[str]]) -> list[str]:
    """Merges layers: the last of equal keys wins, and a choice of a group drops earlier settings in it."""
    found: dict[str, str] = {}
    for layer in layers:
        keys = [Override.parse(override).name for override in layer]
        chosen = [f"{key}{mark}" for key in keys if "." not in key for mark in "./"]
        found = {key: one for key, one in found.items() if not key.startswith(tuple(chosen))}
        for key, override in zip(keys, layer, strict=True):
            found[key] = override
    return list(found.values())
