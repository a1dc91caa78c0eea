"""Computes the metrics of a run from its records: one nested dictionary, written to `summary.json`.

The requests and events that a metric covers:
- TTFT and queue time: every request that reached that point, finished or not; TPOT and E2E: finished
  requests.
- rates: events inside the window (tokens emitted, requests finished).
- shares and latencies: requests that arrived inside the window.
- the whole run, even if the window is shorter: simulated_s, requests (by status), cache.evicted_blocks (pools
  count evictions without their time), adapters, bill_usd (clients also pay for the warm-up), failures,
  retries and scaling.
- speculation: only if a pool speculates, see `sim.metrics.features`.
- pipeline: only if there is one pool; with several pools, by_pool has the pipeline of each.
- publish: time to publish, from arrival to the first token that the user sees. It equals the TTFT, unless the
workload has hidden tokens or clients that wait for the complete output (`sim.workload.clients`).
- throughput.output_tokens_per_s_and_gpu: output tokens divided by the rented GPU-seconds. - per_user: output
tokens/s per user after the first token, 1 / TPOT of each finished request. - by_priority, by_tenant: the
metrics of each class, if there is more than one.
- warmup: how the warm-up was determined (warmup_s=auto). intervals: confidence intervals from this run alone,
  see `sim.metrics.steady`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hwmodels.costs import EnergySettings, Tariff
from sim.metrics.by_class import MAX_KEPT, ByClass, ByPriority, ByTenant
from sim.metrics.definitions import Window, measured_window, plain_json, times
from sim.metrics.dialects import MetricsSettings
from sim.metrics.features import AdapterUse, KvTransferUse, SpeculationUse, migration_figures
from sim.metrics.figure import (
    EndedRun,
    Figure,
    FigureSetting,
    NewSections,
    Part,
    PoolHardware,
    no_sections,
    own_figures,
)
from sim.metrics.fleet import PoolUse, RetryUse, failure_use, scaling_use
from sim.metrics.hardware_use import Bill, Cost, HardwareUse, break_even, energy_figures, training_use
from sim.metrics.kv_use import CacheUse, KvUse, PreemptionUse, Waiting
from sim.metrics.measured import Goodput, Intervals, Latencies, Measured, measure, request_metrics, trimmed
from sim.metrics.output import IterationCounts, OutputFigure, RequestCounts
from sim.metrics.slo import Slo
from sim.metrics.workload import Sections
from sim.records.run import RecordChunk, RunRecords
from sim.records.table import AnyTable, column

if TYPE_CHECKING:
    from sim.metrics.plots import Plots
    from sim.metrics.thinned import ByReplica, Thinned

FIGURES: Final[tuple[type[Figure], ...]] = (
    RequestCounts,
    Latencies,
    ByPriority,
    ByTenant,
    OutputFigure,
    Goodput,
    Intervals,
    HardwareUse,
    KvUse,
    IterationCounts,
    CacheUse,
    AdapterUse,
    PreemptionUse,
    Waiting,
    KvTransferUse,
    SpeculationUse,
    Cost,
    RetryUse,
    PoolUse,
    Bill,
)
OWN: Final = "own."
"""Prefix of the names of user-defined metrics."""
ROWS_AT_ONCE: Final = 1 << 17
"""Number of iterations added at once in a streaming run: a chunk has twice as many, and copies of it would
set the peak memory.
"""


class RunFigures:
    """The metrics of a run so far.

    All records of a run are added once, in any number of chunks, to one or more objects, which are then
    merged. With sketches the memory does not grow with the run, and the summary is bit-identical for any
    division and merging order. It then has two more keys: percentile_error: maximum relative error of the
    percentiles; all other metrics are exact up to rounding. not_computed: missing parts that need complete
    tables, with the reason. window: the measured part of a run whose end is known; its records then come at
    once.
    """

    def __init__(self, setting: FigureSetting, window: Window | None = None) -> None:
        self.setting = setting
        self._window = window
        self.figures: dict[str, Figure] = {kind.name: kind(setting) for kind in FIGURES}
        self.figures |= {f"{OWN}{kind.name}": kind(setting) for kind in setting.own}
        if setting.plots:
            from sim.metrics.plots import PlotFigures  # noqa: PLC0415 (plain runs draw later, or not at all)

            self.figures[PlotFigures.name] = PlotFigures(setting)
        self.sections = Sections(setting.new_sections(setting.kept))
        self.thinned: ByReplica | None = None
        if setting.thinned is not None:
            from sim.metrics.thinned import ByReplica  # noqa: PLC0415 (few fleets are thinned)

            self.thinned = ByReplica(setting.kept, setting.num_replicas)
        self._late: list[tuple[AnyTable, AnyTable]] = []
        """Iterations and events after the end of the last request so far: the run may end before them."""

    def add(self, chunk: RecordChunk, requests: AnyTable | None = None) -> None:
        """Adds a part of the records. requests: the chunk's requests with `request_metrics`, if known.

        Raises AssertionError if the records are inconsistent.
        """
        setting, window = self.setting, self._window_so_far
        table = request_metrics(chunk.requests, setting.slo, chunk.own_s) if requests is None else requests
        whole = Part.of(setting, window, chunk, table)
        if self._window is not None:
            self._add(whole)
        else:
            self._add_until(whole, chunk)
        self.sections.add(chunk, window)
        if self.thinned is not None:
            self.thinned.add(table, window)

    def merge(self, other: RunFigures) -> None:
        """Adds the records of other, which is not changed and was made with the same setting."""
        for name, figure in self.figures.items():
            figure.merge(other.figures[name])
        self._late += other._late
        self.sections.merge(other.sections)
        if self.thinned is not None and other.thinned is not None:
            self.thinned.merge(other.thinned)

    def __getstate__(self) -> dict[str, Any]:
        """Drops the setting, because hardware models cannot be pickled: the copy can only be merged."""
        return {name: value for name, value in vars(self).items() if name != "setting"}

    @property
    def _window_so_far(self) -> Window:
        """The window as far as it is known; the end of a streaming run is unknown."""
        return Window(self.setting.start_s, np.inf) if self._window is None else self._window

    def _add(self, part: Part) -> None:
        _add_to(self.figures, part)

    def _add_until(self, part: Part, chunk: RecordChunk) -> None:
        """Adds a part in pieces; holds back iterations and events that may be after the end of the run."""
        held, self._late = [*self._late, (chunk.iterations, chunk.events)], []
        for iterations, events in (piece for tables in held for piece in _pieces(*tables)):
            is_late = times(iterations, "start_s") + times(iterations, "duration_s") > chunk.until_s
            are_late = times(events, "time_s") > chunk.until_s
            if is_late.any() or are_late.any():
                self._late.append((iterations[is_late], events[are_late]))
                iterations, events = iterations[~is_late], events[~are_late]
            self._add(replace(part, iterations=iterations, events=events))
            part = part.without_requests()
        if chunk.unfilled_since is not None:
            upto = chunk.unfilled_since.copy()
            for late, _ in self._late:
                np.minimum.at(upto, column(late, "replica", np.int64), column(late, "iteration", np.int64))
            iterations, events = chunk.iterations[:0], chunk.events[:0]
            self._add(replace(part, iterations=iterations, events=events, unfilled_upto=upto))

    def _ended(self, end: RunRecords) -> EndedRun:
        """Returns the run with all metrics; they are copies if late rows are added up to its end."""
        setting = self.setting
        if self._window is not None:
            return EndedRun(setting=setting, records=end, window=self._window, figures=self.figures)
        window = measured_window(end.end_s, warmup_s=setting.start_s)
        copied = deepcopy(self.figures) if self._late or window.is_empty else self.figures
        requests = request_metrics(
            end.requests[:0], setting.slo, {term: np.zeros(0) for term in setting.own_terms}
        )
        for iterations, events in self._late:
            part = Part(
                setting=setting,
                window=window,
                end_s=end.end_s,
                requests=requests,
                iterations=iterations,
                events=events,
                gap_s=end.gap_s[:0],
                gap_count=end.gap_count[:0],
                gap_end_s=end.gap_end_s[:0],
                pool_by_replica=end.pool_by_replica,
            )
            _add_to(copied, part)
        if window.is_empty:
            for figure in copied.values():
                figure.forget_measured()
        return EndedRun(setting=setting, records=end, window=window, figures=copied)

    def plots(self, end: RunRecords) -> Plots:
        """Returns the plot data of the page; the setting must have `plots`. end: see `summary`."""
        from sim.metrics.plots import Plots  # noqa: PLC0415 (see above)

        return Plots.of(self._ended(end).figures)

    def summary(self, end: RunRecords, part: Measured | None = None) -> dict[str, Any]:
        """Returns the summary. end: the records of the whole run, whose tables may have no rows.

        part: the measured part of a run with complete records. Raises AssertionError if records are missing
        (`check_conservation`).
        """
        setting = self.setting
        run = self._ended(end)
        latencies: Latencies = run.figures[Latencies.name]
        trim = (
            part.trimmed
            if part is not None
            else {
                "trimmed": trimmed(run.window, setting.start_s, 0.0, latencies.num_left_out),
                "warmup": None,
            }
        )
        figures = assembled(run, trim) | self.sections.value(run.window)
        if not setting.kept.is_exact:
            lacks = self._not_computed(run.figures)
            figures |= {"percentile_error": setting.kept.error, "not_computed": lacks}
        plain: dict[str, Any] = plain_json(figures)
        if setting.thinned is not None and self.thinned is not None:
            plain["thinned"] = setting.thinned.of_the_whole(
                plain,
                self.thinned,
                num_replicas=setting.num_replicas,
                has_sessions=self.thinned.has_sessions,
            )
        return plain

    def _not_computed(self, figures: Mapping[str, Figure]) -> dict[str, str]:
        """Returns the missing parts of the summary, with the reason."""
        found = {
            figure.name: f"more than {MAX_KEPT} classes"
            for figure in figures.values()
            if isinstance(figure, ByClass) and figure.has_too_many
        }
        if self.sections.lack is not None:
            found["clients"] = self.sections.lack
        return found


def _add_to(figures: Mapping[str, Figure], part: Part) -> None:
    """Adds a part to all metrics; user-defined metrics get it with pandas frames."""
    in_pandas = part.in_pandas() if part.setting.own else part
    for name, figure in figures.items():
        figure.add(in_pandas if name.startswith(OWN) else part)


def assembled(run: EndedRun, trim: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of the summary in their order. trim: the sections on the measured part."""
    records = run.records
    latencies: Latencies = run.figures[Latencies.name]
    iterations: IterationCounts = run.figures[IterationCounts.name]
    work: HardwareUse = run.figures[HardwareUse.name]
    in_pandas = run.in_pandas() if run.setting.own else run
    found = {
        name: figure.value(in_pandas if name.startswith(OWN) else run) for name, figure in run.figures.items()
    }
    classes = {name: found[name] for name in (ByPriority.name, ByTenant.name) if found[name]}
    speculation = found[SpeculationUse.name]
    own = {
        kind.name: {"value": found[f"{OWN}{kind.name}"], "unit": kind.unit, "definition": kind.definition}
        for kind in run.setting.own
    }
    return {
        "simulated_s": records.end_s,
        "interrupted": records.interrupted,
        "overload": None if records.overload is None else records.overload._asdict(),
        "missed": None if records.missed is None else records.missed._asdict(),
        "requests": found["requests"],
        **trim,
        **found["latencies"],
        **classes,
        "throughput": found["throughput"],
        "per_user": latencies.per_user(),
        "goodput": found["goodput"],
        "intervals": found["intervals"],
        **found["hardware_use"],
        "pipeline": work.pipelines(run)[0] if len(run.setting.pools) == 1 else None,
        "kv": found["kv"],
        "iterations": found["iterations"],
        "preemptions": iterations.preemptions,
        "cache": found["cache"],
        "adapters": found["adapters"],
        "preemption": found["preemption"],
        "waiting": found["waiting"],
        "kv_transfer": found["kv_transfer"],
        **({} if speculation is None else {"speculation": speculation}),
        **({} if records.migrations is None else {"migrations": migration_figures(records)}),
        "cost": found["cost"],
        "troubles": failure_use(records),
        "retries": found["retries"],
        "scaling": scaling_use(records, [pool.num_devices for pool in run.setting.pools]),
        "by_pool": found["by_pool"],
        "bill_usd": found["bill_usd"],
        "energy": energy_figures(run),
        "training": training_use(run),
        **break_even(found["cost"], found["bill_usd"]),
        "publish": found["latencies"]["ttft"],
        **({"own": own} if own else {}),
    }


def summarise(
    records: RunRecords,
    *,
    pools: Sequence[PoolHardware],
    slo: Slo | None,
    energy: EnergySettings | None = None,
    tariff: Tariff | None = None,
    metrics: MetricsSettings = MetricsSettings(),
    part: Measured | None = None,
    new_sections: NewSections = no_sections,
    thinned: Thinned | None = None,
) -> dict[str, Any]:
    """Computes all metrics of a run as plain JSON: seconds, shares from 0 to 1, None for missing values.

    pools: hardware of the pools, in the order of the records. part: the result of `measure`, if it is known.
    new_sections, thinned: see `FigureSetting`. Without an SLO there is no goodput, without a power model of
    the device no energy. Raises AssertionError if the records are inconsistent (`check_conservation`).
    """
    part = part or measure(records, metrics, slo)
    setting = FigureSetting(
        pools=pools,
        pool_records=records.pools,
        slo=slo,
        energy=energy,
        tariff=tariff,
        metrics=metrics,
        thinned=thinned,
        new_sections=new_sections,
        num_replicas=records.num_replicas,
        plots=False,
        own=own_figures(metrics.own),
    )
    figures = RunFigures(setting, part.window)
    figures.add(RecordChunk.of(records), part.table)
    return figures.summary(records, part)


def request_figures(records: RunRecords, part: Measured, slo: Slo | None) -> dict[str, Any]:
    """Computes the measured part, the latencies and the metrics of each class, which every run has."""
    setting = FigureSetting(pools=(), pool_records=records.pools, slo=slo)
    rows = Part.of(setting, part.window, RecordChunk.of(records), part.table)
    latencies, classes = Latencies(setting), (ByPriority(setting), ByTenant(setting))
    run = EndedRun(setting=setting, records=records, window=part.window)
    for figure in (latencies, *classes):
        figure.add(rows)
    found = {figure.name: figure.value(run) for figure in classes}
    return {**part.trimmed, **latencies.value(run), **{name: one for name, one in found.items() if one}}


def _pieces(iterations: AnyTable, events: AnyTable) -> Iterator[tuple[AnyTable, AnyTable]]:
    """Yields the iterations in pieces of `ROWS_AT_ONCE`, the first with the events."""
    for begin in range(0, max(len(iterations), 1), ROWS_AT_ONCE):
        yield iterations[begin : begin + ROWS_AT_ONCE], events if not begin else events[:0]
