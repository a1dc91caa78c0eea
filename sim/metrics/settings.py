"""Settings of the measurement of a run."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from sim.metrics.dialects import DIALECTS


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSettings:
    """Settings of the measurement: the measured part of the run and further definitions of its figures."""

    warmup_s: float | Literal["auto"] = 0.0
    """Simulated seconds at the start that are not measured; auto: determined by MSER-5, see
    `sim.metrics.steady`."""
    cooldown_s: float = 0.0
    """Simulated seconds at the end that are not measured."""
    dialect: Literal["ours", "vllm_bench", "guidellm", "aiperf", "mlperf", "all"] = "ours"
    """Also reports the figures by the definitions of this tool: see `sim.metrics.dialects`."""
    percentiles: Literal["estimated", "exact"] = "estimated"
    """Percentiles of a run that streams its tables: estimated as it goes on, or, for all latencies but ITL,
    read from the table of requests at its end. Those of other runs are always exact."""

    own: tuple[str, ...] = ()
    """Metrics of your own: dotted paths of subclasses of `sim.metrics.figure.Figure`."""

    def __post_init__(self) -> None:
        for name in ("warmup_s", "cooldown_s"):
            value = getattr(self, name)
            if value != "auto" and not 0 <= value < inf:
                or_auto = ", or auto" if name == "warmup_s" else ""
                raise ValueError(f"{name}={value}: must be a finite number >= 0 s{or_auto}")

    @property
    def dialects(self) -> tuple[str, ...]:
        """Names of the other tools by the definitions of which the figures are reported."""
        return (
            tuple(DIALECTS) if self.dialect == "all" else (self.dialect,) if self.dialect in DIALECTS else ()
        )

    @property
    def known_warmup_s(self) -> float:
        """Warm-up in seconds, for runs in which it cannot be determined. Raises ValueError for auto."""
        if self.warmup_s == "auto":
            raise ValueError(
                "warmup_s=auto: works in simulated runs only; here it must be a number of seconds"
            )
        return float(self.warmup_s)
