"""The settings of the accumulators of a run, and which of them work without whole tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hwmodels.iterations.energy import EnergySettings
from hwmodels.speculation.model import SpeculativeModel
from hwmodels.tariff import Tariff
from sim.metrics.folds.latencies import LatencyFold
from sim.metrics.folds.sections import SectionFold
from sim.metrics.settings import MetricsSettings
from sim.metrics.slo import Slo
from sim.metrics.thinned import Thinned
from sim.metrics.utilisation import PoolHardware
from sim.records.run import PoolRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldSetting:
    """Settings of the accumulators: hardware and KV memory of the pools, SLO, prices and the measured part.

    pools, pool_records: in the order of the records. Raises ValueError for a measured part that is known only
    from whole tables.
    """

    pools: Sequence[PoolHardware]
    pool_records: Sequence[PoolRecord]
    slo: Slo | None = None
    energy: EnergySettings | None = None
    tariff: Tariff | None = None
    metrics: MetricsSettings = MetricsSettings()
    thinned: Thinned | None = None
    """The workload of a thinned fleet; None: the fleet is whole."""
    new_sections: Callable[[], list[SectionFold]] = list
    """Makes the accumulators of the sections that the workload adds."""
    num_replicas: int = 0
    """Replicas of a thinned fleet."""
    new_latencies: Callable[[], list[LatencyFold]] = list
    """Makes what computes the latencies of `own_terms`."""
    plots: bool = True
    """Whether what the plots show is added up as well."""

    def __post_init__(self) -> None:
        metrics, way = self.metrics, "streamed tables"
        if metrics.warmup_s == "auto":
            raise ValueError(
                "metrics.warmup_s=auto: the end of the warm-up is found from the latencies of all requests, "
                f"which a run with {way} does not keep; give it in seconds, such as metrics.warmup_s=600"
            )
        if metrics.cooldown_s:
            raise ValueError(
                f"metrics.cooldown_s={metrics.cooldown_s:g}: must be 0 with {way}, as the end of the run is "
                "known only when the figures have been added up; stop the arrivals later instead"
            )
        if metrics.dialect != "ours":
            raise ValueError(
                f"metrics.dialect={metrics.dialect}: needs the time of every token, which a run with {way} "
                "does not keep; choose metrics.dialect=ours, or windtunnel dialects on a shorter run"
            )

    @property
    def speculates(self) -> bool:
        """Returns whether a pool may speculate."""
        return any(isinstance(pool.model, SpeculativeModel) for pool in self.pools)

    @property
    def own_terms(self) -> tuple[str, ...]:
        """Returns the latencies that only the workload knows and the SLO limits."""
        return () if self.slo is None else self.slo.workload_terms
