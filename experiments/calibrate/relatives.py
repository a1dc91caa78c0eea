"""The GPUs of a folder of measured tables, and the relatives that would lend them a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from experiments.calibrate.tables import tables_of
from experiments.study.presets import NotSimulatedError, preset
from hwmodels.device import Device
from hwmodels.operators import Calibration
from sim.settings.build import build
from sim.settings.errors import ConfigError, suggest

SIMILAR = {
    "sm80": ("sm80", "sm90", "sm89", "sm120", "sm100"),
    "sm89": ("sm89", "sm120", "sm80", "sm90", "sm100"),
    "sm90": ("sm90", "sm100", "sm80", "sm120", "sm89"),
    "sm100": ("sm100", "sm90", "sm80", "sm120", "sm89"),
    "sm120": ("sm120", "sm89", "sm90", "sm80", "sm100"),
}
"""Compute capability -> all of them, the most similar first, from which to take a relative's calibration."""


class Found(NamedTuple):
    """GPUs of a folder of tables."""

    presets: list[str]
    """Hardware presets, by compute capability, then name."""
    unknown: list[str]
    """Names in the column gpu without a hardware preset."""


def measured_gpus(ops: Path) -> Found:
    """Returns the GPUs that the folder's tables name. Raises ConfigError if none has a hardware preset."""
    known, unknown = set(), []
    for name in sorted(set().union(*(table["gpu"].unique() for table in tables_of(ops).values()))):
        try:
            known.add(preset("hardware", str(name)))
        except NotSimulatedError:
            unknown.append(str(name))
    if not known:
        if not unknown:
            raise ConfigError(f"ops={ops}: the tables have no rows; give a folder of measured operators")
        choices = [choice.name for choice in find_groups([CONFIG_DIR])["hardware"]]
        found = ", ".join(unknown)
        raise ConfigError(f"ops={ops}: gpu={found}: has no hardware preset; {suggest(found, choices)}")
    return Found(sorted(known, key=lambda name: (generation(composed(name)[1]), name)), unknown)


def generation(calibration: Calibration) -> int:
    """Returns the number in the compute capability whose kernels a calibration names: 90 for sm90."""
    return int(calibration.gemm.compute_capability.removeprefix("sm"))


def composed(name: str) -> tuple[Device, Calibration]:
    """Returns the device of a hardware preset, and its calibration."""
    cfg = resolved(ConfigSource(config_name="calibrate", dirs=[CONFIG_DIR]).compose([f"hardware={name}"]))
    return build(cfg["hardware"], "hardware"), build(cfg["calibration"], "calibration")


def known_calibrations() -> dict[str, Calibration]:
    """Returns the calibrations of all hardware presets that were measured, by preset."""
    groups = find_groups([CONFIG_DIR])
    hardware = {choice.name for choice in groups["hardware"]}
    both = {choice.name: composed(choice.name) for choice in groups["calibration"] if choice.name in hardware}
    return {
        name: calibration
        for name, (device, calibration) in both.items()
        if calibration.measured_on == device.name
    }


def relative_of(name: str, calibrations: Mapping[str, Calibration]) -> str:
    """Returns the preset with the most similar calibration that was not measured on this GPU.

    calibrations: by preset, that of `name` included. Of equally similar ones the first by name is taken.
    """
    own = calibrations[name]
    measured = {known: found for known, found in calibrations.items() if found.measured_on is not None}
    others = [other for other, found in measured.items() if found.measured_on != own.measured_on]
    order = SIMILAR[own.gemm.compute_capability]
    return min(others, key=lambda other: (order.index(measured[other].gemm.compute_capability), other))
