"""Settings of `windtunnel goodput`: arms, rates, attainment target and precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated

from experiments.study.override_lines import by_name, check_lines
from experiments.study.seeds import check_seeds
from experiments.study.settings import StudySettings, check_least, check_num_runs
from fieldlimits import Ge, Le, Lt, PositiveShare, check

MAX_REQUESTS = 100_000_000
RESERVED = {
    "seed": "goodput.seeds sets the seeds",
    "load": "the search varies the load; set goodput.rates to choose rates",
}
"""Keys that neither the command line nor an arm may set -> the reason."""

ONLY_ARM = "as set"


@dataclass(frozen=True, kw_only=True, slots=True)
class GoodputSettings(StudySettings):
    """Node `goodput` of configs/goodput.yaml; the rest of the config is the scenario."""

    arms: tuple[str, ...] = ()
    """Configurations to compare: overrides of the current settings, separated by spaces.

    A name before a colon is optional; without one, an arm is named by its overrides. Empty: no overrides.
    """
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] | None = None
    """Rates of the curves, in requests/s; None: `num_rates` rates around each arm's highest."""
    num_rates: Annotated[int, Ge(2)] = 12
    target: Annotated[PositiveShare | None, "such as 0.9 for 90 %", "null for the SLO's target"] = None
    """Share of the arrivals that must meet the SLO; None: slo.attainment_target."""
    precision: Annotated[float, Ge(0.001), Le(0.5), "such as 0.02 for 2 %"] = 0.02
    """Relative precision of the highest rate of each seed."""
    requests: int | None = 1000
    """Minimum number of requests per run, raised until the run is long enough; None: the whole workload."""
    max_requests: Annotated[int, Ge(100), Le(MAX_REQUESTS)] = 200_000
    """Number of requests up to which the traffic of a run is made longer until it shows a steady state."""
    warmup_share: Annotated[float, Ge(0), Lt(1), "such as 0.1 for 10 %"] = 0.1
    """Share of the first arrivals of each run, which find an idle service and are not counted.

    Ignored if metrics.warmup_s or cooldown_s is set.
    """
    slo_scales: tuple[float, ...] = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
    """Factors on all SLO limits, for the curve at one rate."""
    scale_rate: float | None = None
    """Rate of that curve, in requests/s; None: the lowest of the arms' highest rates."""

    def __post_init__(self) -> None:
        check(self)
        check_seeds(self.seeds, "three")
        if self.rates is not None:
            _check_positive("rates", self.rates)
        if self.scale_rate is not None:
            _check_positive("scale_rate", (self.scale_rate,))
        _check_positive("slo_scales", self.slo_scales)
        check_least(self, {"requests": 10, "jobs": 1}, "; null: no limit")
        check_lines("arms", self.arms, RESERVED)
        num_rates = self.num_rates if self.rates is None else len(self.rates)
        num_runs = max(1, len(self.arms)) * len(self.seeds) * num_rates
        check_num_runs(num_runs, "num_rates", num_rates, "all arms, seeds and rates")

    @property
    def overrides_by_arm(self) -> Mapping[str, tuple[str, ...]]:
        """Name -> overrides; without arms, one arm without overrides."""
        return by_name(self.arms or (f"{ONLY_ARM}:",))


def _check_positive(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        if not 0 < value < inf:
            raise ValueError(f"{name}={value:g}: must be finite and > 0")
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name}={list(values)}: must be one or more numbers, all different")
