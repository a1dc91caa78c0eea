"""The accumulators of all figures of a run: they give its summary without its tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.metrics.adapters import add_adapter_use
from sim.metrics.assembly import Setting, Sums, assemble
from sim.metrics.by_class import KINDS
from sim.metrics.fleet import add_requests_by_pool
from sim.metrics.folds.classes import MAX_FOLDED, ClassesFold
from sim.metrics.folds.exact import ExactTotals
from sim.metrics.folds.measured import MeasuredFold
from sim.metrics.folds.plots import Plots, PlotsFold
from sim.metrics.folds.sections import SectionFolds
from sim.metrics.folds.setting import FoldSetting
from sim.metrics.folds.sketch import PERCENTILE_ERROR
from sim.metrics.folds.thinned import ThinnedFold
from sim.metrics.measured import request_metrics, trimmed
from sim.metrics.pressure import knows_waits
from sim.metrics.summary import (
    add_kept_tokens,
    add_token_counts,
    add_whole_requests,
    check_rows,
    checked_counts,
    plain_json,
)
from sim.metrics.transfers import add_cached_tokens, transferred
from sim.metrics.utilisation import rented_s
from sim.metrics.window import measured_window
from sim.records.chunk import RecordChunk
from sim.records.run import RunRecords


class RunFold:
    """The figures of a run so far, in memory that does not grow with its length.

    All records of a run are added once, in any number of chunks, to one or several folds, which are then
    merged: the summary is the same bit for bit whatever the cuts and the order of merging. It has the keys of
    `summarise`, and two more:

    percentile_error: largest relative error of the percentiles; all other figures are exact up to rounding.
    not_computed: what is missing as it needs whole tables, with the reason.
    """

    def __init__(self, setting: FoldSetting) -> None:
        self.setting = setting
        self.whole = ExactTotals()
        start_s, num_pools = setting.metrics.known_warmup_s, len(setting.pools)
        self.measured = MeasuredFold(num_pools, start_s, plots=setting.plots)
        self.classes = {kind: ClassesFold(kind) for kind in KINDS}
        self.more_plots = PlotsFold(start_s, speculates=setting.speculates) if setting.plots else None
        self.sections = SectionFolds(setting.new_sections())
        self.thinned = None if setting.thinned is None else ThinnedFold(setting.num_replicas)

    def add(self, chunk: RecordChunk) -> None:
        """Adds a part of the records. Raises AssertionError if it is inconsistent."""
        setting, window = self.setting, self.measured.window
        check_rows(chunk.requests)
        table = request_metrics(chunk.requests, setting.slo, chunk.own_s)
        add_whole_requests(self.whole, table, setting.tariff)
        add_requests_by_pool(self.whole, table, chunk.pool_by_replica, len(setting.pools))
        add_token_counts(self.whole, table)
        self.whole.add("transferred", np.ones(len(transferred(table)), np.bool_))
        self.whole.add("gap_count", chunk.gap_count)
        add_kept_tokens(self.whole, chunk.iterations)
        add_adapter_use(self.whole, chunk.iterations)
        add_cached_tokens(self.whole, chunk.events)
        self.measured.add(chunk, table, setting)
        for fold in self.classes.values():
            fold.add(table, window, setting.slo)
        if self.more_plots is not None:
            self.more_plots.add(chunk, table, window, setting)
        self.sections.add(chunk, window)
        if self.thinned is not None:
            self.thinned.add(table, window)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the setting out, as hardware models cannot be pickled: the copy can be merged only."""
        return {name: value for name, value in vars(self).items() if name != "setting"}

    def merge(self, other: RunFold) -> None:
        """Adds the records of other, which is not changed and was made with the same setting."""
        self.whole.merge(other.whole)
        self.measured.merge(other.measured)
        for kind, fold in self.classes.items():
            fold.merge(other.classes[kind])
        if self.more_plots is not None and other.more_plots is not None:
            self.more_plots.merge(other.more_plots)
        self.sections.merge(other.sections)
        if self.thinned is not None and other.thinned is not None:
            self.thinned.merge(other.thinned)

    def plots(self, end: RunRecords) -> Plots:
        """Returns what the plots of the page show; the setting has `plots`. end: see `summary`."""
        measured = self._measured_until(end)
        assert self.more_plots is not None
        assert measured.times is not None
        sketches = {name: measured.sketches[name] for name in ("ttft", "tpot", "itl", "e2e")}
        return Plots(sketches, measured.rates, self.more_plots, measured.times)

    def _measured_until(self, end: RunRecords) -> MeasuredFold:
        """Returns the measured part of a run that has ended. end: see `summary`."""
        setting = self.setting
        window = measured_window(end.end_s, warmup_s=setting.metrics.known_warmup_s)
        if window.is_empty:
            return MeasuredFold(len(setting.pools), window.start_s, plots=setting.plots)
        return self.measured.ended(end.end_s, setting)

    def summary(self, end: RunRecords) -> dict[str, Any]:
        """Returns the summary. end: the records of the whole run, whose tables may have no rows.

        Raises AssertionError if records are missing (`check_conservation`).
        """
        setting, metrics = self.setting, self.setting.metrics
        checked_counts(self.whole, end.num_lost_first_tokens)
        window = measured_window(end.end_s, warmup_s=metrics.known_warmup_s)
        measured = self._measured_until(end)
        num_left_out = int(self.whole["arrived"]) - int(measured.totals["measured"])
        classes = [fold.figures(window, setting.slo) for fold in self.classes.values()]
        has_transfers = self.whole["transferred"] > 0
        figures = assemble(
            end,
            window,
            Sums(
                whole=self.whole,
                inside=measured.totals,
                latencies={
                    "trimmed": trimmed(window, metrics.known_warmup_s, 0.0, num_left_out),
                    "warmup": None,
                    **measured.latencies(),
                    **{kind: figures for found in classes for kind, figures in found.items()},
                },
                per_user=measured.per_user(),
                intervals=measured.intervals(window, setting),
                transfer_seconds=measured.sketches["transfer"].describe() if has_transfers else None,
                knows_waits=knows_waits(end.requests),
                kv_internal_s=None if end.unfilled is None else measured.unfilled_s,
                works=measured.pools.works(rented_s(end, window), setting),
                pipelines=measured.pools.pipelines(setting),
            ),
            Setting(pools=setting.pools, slo=setting.slo, energy=setting.energy, tariff=setting.tariff),
        )
        figures |= self.sections.figures(window)
        figures |= {"percentile_error": PERCENTILE_ERROR, "not_computed": self._not_computed()}
        plain: dict[str, Any] = plain_json(figures)
        if setting.thinned is not None and self.thinned is not None:
            plain["thinned"] = setting.thinned.of_the_whole(
                plain,
                self.thinned,
                num_replicas=setting.num_replicas,
                has_sessions=self.thinned.has_sessions,
            )
        return plain

    def _not_computed(self) -> dict[str, str]:
        """Returns what the summary lacks, with the reason."""
        found = {
            f"by_{kind}": f"more than {MAX_FOLDED} classes"
            for kind, fold in self.classes.items()
            if fold.has_too_many
        }
        if self.sections.lack is not None:
            found["clients"] = self.sections.lack
        return found
