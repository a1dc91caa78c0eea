"""Settings of what is measured of a run."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from sim.metrics.dialects import DIALECTS


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSettings:
    """Which part of the run is measured."""

    warmup_s: float | Literal["auto"] = 0.0
    """Simulated seconds at the start that no figure counts; auto: found by MSER-5, see `one_run`."""
    cooldown_s: float = 0.0
    """The same at the end."""
    dialect: Literal["ours", "vllm_bench", "guidellm", "aiperf", "mlperf", "all"] = "ours"
    """Tools by whose definitions the figures are reported besides ours: `sim.metrics.dialects`."""

    def __post_init__(self) -> None:
        for name in ("warmup_s", "cooldown_s"):
            value = getattr(self, name)
            if value != "auto" and not 0 <= value < inf:
                or_auto = ", or auto" if name == "warmup_s" else ""
                raise ValueError(f"{name}={value}: must be a finite number >= 0 s{or_auto}")

    @property
    def dialects(self) -> tuple[str, ...]:
        """Those of other tools that are asked for."""
        return (
            tuple(DIALECTS) if self.dialect == "all" else (self.dialect,) if self.dialect in DIALECTS else ()
        )

    @property
    def known_warmup_s(self) -> float:
        """For what is not simulated. Raises ValueError where it would have to be found."""
        if self.warmup_s == "auto":
            raise ValueError("warmup_s=auto: is found in simulated runs; here it must be a number of seconds")
        return float(self.warmup_s)
