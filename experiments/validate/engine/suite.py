"""The cases of a validation: each a run's settings, composed as the command line would have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig

from experiments.app.run_folder import resolved_config
from experiments.calibrate.engine.files import Files
from experiments.validate.fidelity.settings import Suite, ValidateSettings, split
from hwmodels.model.model_spec import ModelSpec
from sim.settings.compose import Composition, ConfigSource
from sim.settings.errors import ConfigError
from sim.settings.hydra_errors import composed
from sim.settings.override import Override, not_about
from sim.settings.scenario import build_scenario
from sim.setup.scenario import Scenario

MEASURED_GROUPS = ("hardware", "calibration", "latency", "engine")
"""What the machine decides, neither the command line nor a case."""

DEVICE_DEFAULTS = {"cpu": ("model=random_8m", "thresholds=cpu"), "cuda": ("thresholds=gpu",)}


class Case(NamedTuple):
    """One of a suite. config: resolved."""

    name: str
    settings: ValidateSettings
    scenario: Scenario
    config: dict[str, Any]


def cases_of(composition: Composition, suite: Suite, device: str, calibrated: Files | None) -> list[Case]:
    """Every case, on the machine as calibrated; None: on the default one, to see that they can be built.

    Raises ConfigError, which names the case.
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
            if device == "cpu" and cfg.model.get("dtype") == "auto":
                cfg.model.dtype = "fp32"  # as the engine has it by default
            found.append(_case(name, cfg))
        except ConfigError as error:
            where = f"case {name}: " if len(suite.cases) > 1 else ""
            raise ConfigError(f"{where}{error}") from error
    return found


def model_of(cases: Sequence[Case]) -> ModelSpec:
    """Of all of them. Raises ConfigError if there are several: one table is measured."""
    first = cases[0].scenario.model
    for case in cases[1:]:
        if case.scenario.model != first:
            raise ConfigError(f"case {case.name}: model: all cases run the same model; give it to all")
    return first


def _case(name: str, cfg: DictConfig) -> Case:
    settings, given = split(cfg)
    return Case(name, settings, build_scenario(given), resolved_config(cfg))


def _check_unmeasured(overrides: Sequence[str], device: str) -> None:
    """Refuse to choose what the machine decides."""
    for override in overrides:
        if (key := Override.parse(override).key) in MEASURED_GROUPS:
            raise ConfigError(
                f"{override}: device={device} is measured; leave {key}= out (single settings, such as "
                "engine.max_num_seqs=8, may be given)"
            )


def _merged(layers: Iterable[Sequence[str]]) -> list[str]:
    """Of equal keys the last one alone. A choice in a group drops what layers before have set in it."""
    found: dict[str, str] = {}
    for layer in layers:
        keys = [Override.parse(override).key for override in layer]
        chosen = [f"{key}{mark}" for key in keys if "." not in key for mark in "./"]
        found = {key: one for key, one in found.items() if not key.startswith(tuple(chosen))}
        for key, override in zip(keys, layer, strict=True):
            found[key] = override
    return list(found.values())
