"""Settings of `windtunnel validate` besides those of a simulated run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from experiments.validate.fidelity.thresholds import Thresholds
from fieldlimits import Checked, OneOf, Positive, PositiveInt, check
from sim.settings.build import build_as

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Cases of a validation: overrides by name, which win over the command line's, which win over base."""

    cases: Mapping[str, tuple[str, ...]]
    base: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError("cases: must have at least one")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateSettings(Checked):
    """Settings with either against (recordings) or device (run our own engine now)."""

    thresholds: Thresholds
    against: str | tuple[str, ...] | None = None
    device: Annotated[str | None, OneOf(DEVICES)] = None
    attention_backend: str = "triton"
    """With device: attention of prompts' chunks, a name of the engine's setting."""
    suite: Suite = field(default_factory=lambda: Suite(cases={"run": ()}))
    load: Annotated[Positive | None, "such as 0.6", "null for the workload's own pace"] = None
    """Share of the simulated capacity to which arrivals are paced; None: the workload's own pace."""
    repeats: PositiveInt = 1
    calibrated: str | None = None
    """Folder of `windtunnel calibrate device=...`; None: the machine is measured first."""
    run: str | tuple[str, ...] | None = None
    slo_scales: tuple[float, ...] = (1.0,)
    check_config: bool = True
    write_acceptance: str | None = None
    """CSV file to which the acceptance of draft tokens is written, for acceptance=table; None: none."""

    def __post_init__(self) -> None:
        check(self)
        if (self.against is None) == (self.device is None):
            given = "neither" if self.against is None else "both"
            raise ValueError(
                f"device, against: {given} given; give either device=cpu or device=cuda, which runs "
                "our own engine on this machine, or against=FILE, which reads measurements"
            )
        if self.calibrated is not None and not Path(self.calibrated).is_dir():
            raise ValueError(
                f"calibrated={self.calibrated}: no such folder; give a folder written by windtunnel calibrate"
            )
        for scale in self.slo_scales:
            if not 0 < scale < float("inf"):
                raise ValueError(f"slo_scales={list(self.slo_scales)}: each must be a finite number > 0")
        if len(self.files) > 1 and len(self.runs) > 1:
            raise ValueError(
                "run=[...]: several runs must come from one file; give a single file in against="
            )

    @property
    def files(self) -> tuple[Path, ...]:
        names = (self.against,) if isinstance(self.against, str) else self.against or ()
        return tuple(Path(name).expanduser() for name in names)

    @property
    def runs(self) -> tuple[str, ...]:
        if self.run is None:
            return ()
        return (self.run,) if isinstance(self.run, str) else self.run


OWN_KEYS = frozenset(one.name for one in fields(ValidateSettings))


def split(cfg: dict[str, Any]) -> tuple[ValidateSettings, dict[str, Any]]:
    """Returns the validation's own settings, and those of the simulated run. Raises ConfigError."""
    own = {key: value for key, value in cfg.items() if key in OWN_KEYS}
    settings: ValidateSettings = build_as(ValidateSettings, own, "")
    return settings, {key: value for key, value in cfg.items() if key not in OWN_KEYS}
