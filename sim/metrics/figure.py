"""A metric of a run is an accumulator: rows of its records are added in any number of parts, then read.

add(part) adds rows of the records; every row of a run is added once merge(other) adds the rows of another
accumulator of the same kind value(run) the metric as plain data, once the run has ended A run with complete
tables is one part. A streaming run has many parts, and in shards they go to several accumulators, which are
merged. The building blocks of a metric (`Kept`) decide whether percentiles are exact. docs/own_metric.md
shows how to write one. Hardware metrics take the shapes, kinds and components of iterations from their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hwmodels.costs import EnergySettings, PowerModel, Tariff
from hwmodels.iterations import COUNTED, AdapterBatch, DraftWork, IterationModel, IterationShape
from hwmodels.speculation import SpeculativeModel
from sim.metrics.definitions import Window, times
from sim.metrics.dialects import MetricsSettings
from sim.metrics.distributions import EXACT, Kept
from sim.metrics.slo import Slo
from sim.metrics.workload import OwnLatency, SectionFigure
from sim.records.iterations import ADAPTER_COLUMNS
from sim.records.run import PoolRecord, RecordChunk, RunRecords
from sim.records.table import AnyTable, column, to_pandas
from sim.speculation.log import DRAFT_WORK_COLUMNS

if TYPE_CHECKING:
    from sim.metrics.thinned import Thinned


KINDS = ("decode", "mixed", "prefill")
"""Kinds of iteration: decodes only, decodes and prompt chunks, prompt chunks only."""

ROWS_AT_ONCE = 1 << 16  # The model returns a dozen arrays; batches of rows keep them in the CPU cache.


def seconds_inside(iterations: AnyTable, window: Window) -> NDArray[np.float64]:
    """Computes, for each iteration, its seconds inside the window."""
    return window.overlap_s(times(iterations, "start_s"), times(iterations, "duration_s"))


def rented_s(records: RunRecords, window: Window) -> NDArray[np.float64]:
    """Computes, for each pool, the paid replica-seconds inside the window."""
    start_s, end_s = (np.array([getattr(r, name) for r in records.replicas]) for name in ("start_s", "end_s"))
    seconds = window.overlap_s(start_s, end_s - start_s)
    by_pool: NDArray[np.float64] = np.zeros(len(records.pools))
    np.add.at(by_pool, records.pool_by_replica, seconds)
    return by_pool


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolHardware:
    """The hardware properties of a pool's replicas that metrics depend on."""

    model: IterationModel
    price_usd_per_hour: float = 0.0
    """Price of one replica."""
    power: PowerModel | None = None
    """Power model of one device."""
    num_devices: int = 1
    """Number of devices of each replica."""


def share_inside(inside_s: NDArray[np.float64], duration_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Computes the share of each iteration that is inside the window; 0 for an iteration of 0 s."""
    return np.divide(inside_s, duration_s, out=np.zeros_like(inside_s), where=duration_s > 0)


def of_pools(pools: Sequence[PoolRecord], name: str, pool: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns a field of `PoolRecord` for each pool index."""
    return np.array([getattr(one, name) for one in pools], np.float64)[pool]


def component_seconds(
    iterations: AnyTable, inside_s: NDArray[np.float64], model: IterationModel
) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yields the components of the hardware model, and their seconds in up to `ROWS_AT_ONCE` iterations.

    inside_s: the seconds of each iteration, to which its components are scaled.
    """
    parts = model.breakdown(iteration_shape(iterations, model))
    shaped = {name: np.broadcast_to(part, inside_s.shape) for name, part in parts.items()}
    whole = np.sum(list(shaped.values()), axis=0)
    scale = np.divide(inside_s, whole, out=np.zeros_like(whole), where=whole > 0)
    for component, part in shaped.items():
        yield component, part * scale


def iteration_kind(iterations: AnyTable) -> NDArray[np.int64]:
    """Returns, for each iteration, the index of its kind in `KINDS`."""
    prefills, decodes = times(iterations, "prefill_tokens") > 0, times(iterations, "decode_seqs") > 0
    return np.where(prefills, np.where(decodes, 1, 2), 0).astype(np.int64)


def batch_tokens(iterations: AnyTable) -> NDArray[np.int64]:
    """Returns the tokens in the batch of each iteration: prompt tokens, decodes and their draft tokens."""
    tokens: NDArray[np.int64] = column(iterations, "decode_seqs") + column(iterations, "prefill_tokens")
    if "draft_tokens" in iterations:
        tokens = tokens + column(iterations, "draft_tokens")
    return tokens


def iteration_shape(iterations: AnyTable, model: IterationModel) -> IterationShape:
    """Returns the columns of the table as arguments of the hardware model, one value per iteration."""
    adapters = None
    if "adapter_tokens" in iterations:
        adapters = AdapterBatch(*(times(iterations, name) for name in ADAPTER_COLUMNS))
    drafts = None
    if isinstance(model, SpeculativeModel) and "draft_tokens" in iterations:
        drafts = DraftWork(*(times(iterations, name) for name in DRAFT_WORK_COLUMNS))
    counts: dict[str, Any] = {name: times(iterations, name) for name in COUNTED}
    return IterationShape(**counts, adapters=adapters, drafts=drafts)


def one_shape(iterations: AnyTable, row: int, model: IterationModel) -> IterationShape:
    """Returns the arguments of the hardware model for one iteration, as numbers."""
    shape = iteration_shape(iterations[row : row + 1], model)
    counts: dict[str, Any] = {name: _number(getattr(shape, name)) for name in COUNTED}
    adapters = None if shape.adapters is None else AdapterBatch(*map(_number, shape.adapters))
    drafts = None if shape.drafts is None else DraftWork(*map(_number, shape.drafts))
    return shape._replace(**counts, adapters=adapters, drafts=drafts)


def _number(values: Any) -> float:
    return float(np.squeeze(values))


def pieces(num_rows: int) -> list[slice]:
    """Returns slices of at most `ROWS_AT_ONCE` rows."""
    return [slice(i, i + ROWS_AT_ONCE) for i in range(0, num_rows, ROWS_AT_ONCE)]


Floats = NDArray[np.float64]
NewSections = Callable[[Kept], list[SectionFigure]]
"""Makes accumulators of sections of the summary."""


def no_sections(kept: Kept) -> list[SectionFigure]:
    """Returns no additional sections."""
    return []


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureSetting:
    """Settings that metrics depend on: hardware and KV memory of the pools, SLO, prices, measured part.

    pools, pool_records: in the order of the records. Raises ValueError for a measured part that can be
    determined only from complete tables, unless these are `kept`.
    """

    pools: Sequence[PoolHardware]
    pool_records: Sequence[PoolRecord]
    slo: Slo | None = None
    energy: EnergySettings | None = None
    tariff: Tariff | None = None
    metrics: MetricsSettings = MetricsSettings()
    thinned: Thinned | None = None
    """The workload of a thinned fleet; None: the fleet is complete."""
    new_sections: NewSections = no_sections
    """Makes the accumulators of the sections that the workload adds."""
    num_replicas: int = 0
    """Replicas of a thinned fleet."""
    new_latencies: Callable[[], list[OwnLatency]] = list
    """Creates the objects that compute the latencies of `own_terms`."""
    plots: bool = True
    """Whether the data of the plots is accumulated as well."""
    kept: Kept = EXACT
    own: tuple[type[Figure], ...] = ()
    """Metrics of the user's own."""

    def __post_init__(self) -> None:
        metrics, way = self.metrics, "streamed tables"
        if self.kept.is_exact:
            return
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
    def start_s(self) -> float:
        """Returns the start of the measured part, s, if it is known before the run."""
        return 0.0 if self.kept.is_exact else self.metrics.known_warmup_s

    @property
    def speculates(self) -> bool:
        """Returns whether a pool may speculate."""
        return any(isinstance(pool.model, SpeculativeModel) for pool in self.pools)

    @property
    def own_terms(self) -> tuple[str, ...]:
        """Returns the latencies that the SLO limits and only the workload can compute."""
        return () if self.slo is None else self.slo.workload_terms


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of the records of a run, and derived values that most metrics need.

    requests: requests that have ended or will not end in the run, with the columns of `request_metrics`.
    iterations, events, gap_s, gap_count, gap_end_s: see `RunRecords`. window: the measured part of the run,
    as far as it is known: see `holds`. end_s: the end of the run, as far as it is known. unfilled: rows of
    `RunRecords.unfilled`; None: no KV is reserved ahead. unfilled_upto: for each replica, the earliest first
    iteration of rows in later parts, [R]; None: unknown.
    """

    setting: FigureSetting
    window: Window
    end_s: float
    requests: AnyTable
    iterations: AnyTable
    events: AnyTable
    gap_s: Floats
    gap_count: NDArray[np.int64]
    gap_end_s: Floats
    pool_by_replica: NDArray[np.int64]
    unfilled: NDArray[np.int64] | None = None
    unfilled_upto: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, setting: FigureSetting, window: Window, chunk: RecordChunk, requests: AnyTable) -> Part:
        """Returns all rows of a chunk. requests: with the columns of `request_metrics`."""
        return cls(
            setting=setting,
            window=window,
            end_s=chunk.until_s if setting.kept.is_exact else np.inf,
            requests=requests,
            iterations=chunk.iterations,
            events=chunk.events,
            gap_s=chunk.gap_s,
            gap_count=chunk.gap_count,
            gap_end_s=chunk.gap_end_s,
            pool_by_replica=chunk.pool_by_replica,
            unfilled=chunk.unfilled,
        )

    @cached_property
    def measured(self) -> AnyTable:
        """The requests that arrived in the window."""
        return self.requests[self.window.holds(times(self.requests, "arrival_s"))]

    @cached_property
    def gaps_inside(self) -> NDArray[np.int64]:
        """`gap_count` with 0 for gaps that end outside the window, which avoids a copy of the gaps."""
        return self.gap_count * self.window.holds(self.gap_end_s)

    @cached_property
    def inside_s(self) -> Floats:
        """Seconds of each iteration inside the window."""
        return self.window.overlap_s(times(self.iterations, "start_s"), times(self.iterations, "duration_s"))

    @cached_property
    def ends_s(self) -> Floats:
        """Ends of the iterations, s. A rounded sum does not exceed the end of the run."""
        found: Floats = np.minimum(
            times(self.iterations, "start_s") + times(self.iterations, "duration_s"), self.end_s
        )
        return found

    @cached_property
    def ends_inside(self) -> NDArray[np.bool_]:
        """True for the iterations that ended in the window."""
        return self.window.holds(self.ends_s)

    @cached_property
    def pool(self) -> NDArray[np.int64]:
        """Index of the pool of each iteration."""
        found: NDArray[np.int64] = self.pool_by_replica[column(self.iterations, "replica")]
        return found

    @cached_property
    def rows_by_pool(self) -> list[NDArray[np.bool_] | slice]:
        """The iterations of each pool."""
        if len(self.setting.pools) == 1:
            return [slice(None)]
        return [self.pool == index for index in range(len(self.setting.pools))]

    def by_replica(self, name: str) -> Floats:
        """Returns a field of `PoolRecord` for each replica, [R]."""
        return of_pools(self.setting.pool_records, name, self.pool_by_replica)

    def in_pandas(self) -> Part:
        """Returns the part with pandas frames for tables, for user-defined metrics."""
        return replace(
            self,
            requests=to_pandas(self.requests),
            iterations=to_pandas(self.iterations),
            events=to_pandas(self.events),
        )

    def without_requests(self) -> Part:
        """Returns a part without the rows that are not iterations or events."""
        return replace(
            self,
            requests=self.requests[:0],
            gap_s=self.gap_s[:0],
            gap_count=self.gap_count[:0],
            gap_end_s=self.gap_end_s[:0],
            unfilled=None,
        )


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """A finished run, for the values of its metrics. records: their tables may have no rows."""

    setting: FigureSetting
    records: RunRecords
    window: Window
    figures: Mapping[str, Any] = field(default_factory=dict)
    """All accumulators of the run by name, because some metrics combine several."""

    def in_pandas(self) -> EndedRun:
        """Returns the run with pandas frames for tables: see `Part.in_pandas`."""
        return replace(self, records=self.records.in_pandas())

    @cached_property
    def replica_s(self) -> Floats:
        """Paid replica-seconds of each pool inside the window."""
        return rented_s(self.records, self.window)


class Figure:
    """A section of the summary, or one number. Subclasses add to `whole` and `inside`, and compute `value`.

    A subclass that needs more than sums creates it in `__init__` from `kept`, and extends `merge`, and
    `forget_measured` for data that covers only the measured part. It does not keep the setting.
    """

    name: ClassVar[str]
    """Key in the summary, in snake_case."""
    unit: ClassVar[str] = ""
    """Unit of the value, such as s; for user-defined metrics."""
    definition: ClassVar[str] = ""
    """Definition for the glossary of the page; for user-defined metrics."""

    def __init__(self, setting: FigureSetting) -> None:
        self.kept = setting.kept
        self.whole = self.kept.totals()
        """Sums over the whole run."""
        self.inside = self.kept.totals()
        """Sums over the measured part."""

    def add(self, part: Part) -> None:
        """Adds rows of the records."""

    def merge(self, other: Any) -> None:
        """Adds the rows of another accumulator of this kind, which is not changed."""
        self.whole.merge(other.whole)
        self.inside.merge(other.inside)

    def forget_measured(self) -> None:
        """Drops the data inside the window, which turned out to be empty."""
        self.inside = self.kept.totals()

    def value(self, run: EndedRun) -> Any:
        """Returns the metric as plain data."""
        raise NotImplementedError


def own_figures(paths: Sequence[str]) -> tuple[type[Figure], ...]:
    """Imports the metrics with these dotted paths. Raises ValueError if one is not a metric."""
    found: dict[str, type[Figure]] = {}
    for place, path in enumerate(paths):
        module, _, name = path.rpartition(".")
        where = f"metrics.own[{place}]={path}"
        try:
            kind = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{where}: must be the dotted path of a class in a module that can be imported, such as "
                f"my_metrics.SlowStarts; {error}"
            ) from error
        if not (isinstance(kind, type) and issubclass(kind, Figure) and hasattr(kind, "name")):
            raise ValueError(
                f"{where}: must be a subclass of sim.metrics.figure.Figure with a `name`, see "
                "docs/own_metric.md"
            )
        if kind.name in found:
            raise ValueError(f"{where}: must have another name than {kind.name}, which an earlier one has")
        found[kind.name] = kind
    return tuple(found.values())
