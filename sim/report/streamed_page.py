"""Writes report.html of a run that keeps no whole tables: the plots that its accumulators can draw."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.folds.bins import Bins
from sim.metrics.folds.drafts import OVER_TIME
from sim.metrics.folds.plots import ALL, MAX_REPLICAS_APART, Octave, Plots, PlotsFold
from sim.metrics.folds.times import MAX_SAMPLE
from sim.metrics.series import cdf_points
from sim.metrics.slo import Slo
from sim.metrics.utilisation import rented_s
from sim.metrics.window import Window
from sim.records.run import RunRecords
from sim.report.attainment import NUM_TIME_BUCKETS, Shares, drawn_attainment
from sim.report.breakdown import drawn_iterations, drawn_time
from sim.report.chart import Chart
from sim.report.fleet import replicas_over_time
from sim.report.latency import MARKED, Curve, drawn_cdfs, drawn_ttft
from sim.report.look import BLUE, GREEN, ORANGE, PURPLE
from sim.report.page import (
    ATTAINMENT_CAPTION,
    ITERATIONS_CAPTION,
    LATENCY_CAPTION,
    REPLICAS_CAPTION,
    TIME_CAPTION,
    TTFT_CAPTION,
    Section,
    over_time_caption,
    write_sections,
)
from sim.report.speculation import CAPTION as SPECULATION
from sim.report.speculation import NUM_BUCKETS, drawn_speculation
from sim.report.timeline import STATES, Rate, StateCurves, drawn_timeline, rate_panels

SAMPLED = (
    f"The time of a kind is divided as in a sample of its iterations, {MAX_SAMPLE:,} at most, because there "
    "are many."
)


def write_streamed_report(
    path: str | Path,
    plots: Plots,
    end: RunRecords,
    summary: dict[str, Any],
    config: dict[str, Any],
    slo: Slo | None,
) -> None:
    """Writes the page of a run from its accumulators.

    end: its records, with tables without rows. summary: result of `RunFold.summary`.
    """
    write_sections(path, streamed_sections(plots, end, summary, slo), summary, config)


def streamed_sections(
    plots: Plots, end: RunRecords, summary: dict[str, Any], slo: Slo | None
) -> list[Section]:
    """Returns the sections of the page from the top; none if nothing was served in the measured time."""
    curves = {}
    for name, sketch in plots.sketches.items():
        marked_s = sketch.percentiles(MARKED) if sketch.count else np.array([])
        curves[name] = Curve(*cdf_points(*sketch.estimates()), marked_s)
    more = plots.more
    octaves = dict(sorted(more.octaves.items()))
    if not octaves and not any(len(curve.values_s) for curve in curves.values()):
        return []
    window = Window(summary["trimmed"]["start_s"], summary["trimmed"]["end_s"])
    sections = []
    if slo is not None and octaves:
        chart = _attainment(more, octaves, summary["goodput"], window, slo)
        sections.append(Section("SLO attainment", ATTAINMENT_CAPTION, chart))
    sections.append(Section("Latency", LATENCY_CAPTION, drawn_cdfs(curves, slo)))
    sections.append(Section("TTFT against prompt length", TTFT_CAPTION, _ttft(more, octaves, slo)))
    sections.append(Section("Over time", over_time_caption(end, window), over_time(plots, end, window)))
    if (figure := replicas_over_time(end)) is not None:
        sections.append(Section("Replicas", REPLICAS_CAPTION, figure))
    if (figure := _speculation(more, end, window)) is not None:
        sections.append(Section("Speculation", SPECULATION, figure))
    replica_s = float(rented_s(end, window).sum())
    time = drawn_time(plots.times.seconds(), plots.times.busy_s, replica_s)
    caption = f"{TIME_CAPTION} {SAMPLED}" if plots.times.is_sample else TIME_CAPTION
    sections.append(Section("Where the time went", caption, time))
    points = [(x, 1e3 * y) for x, y in (kind.drawn() for kind in more.iterations.kinds)]
    tokens, duration_ms = (np.concatenate([pair[place] for pair in points]) for place in range(2))
    sections.append(Section("Iterations", ITERATIONS_CAPTION, drawn_iterations(points, tokens, duration_ms)))
    return sections


def _attainment(
    more: PlotsFold, octaves: Mapping[int, Octave], goodput: Mapping[str, Any], window: Window, slo: Slo
) -> Chart:
    """Plots the shares by time in bins, several of which are joined if there are many."""
    whole = {ALL: goodput["share"]} | {term.upper(): one for term, one in goodput["term_shares"].items()}
    names = {ALL: ALL} | {term.upper(): term for term in slo.limits_s}
    width_s = more.by_time.width_s
    joined = max(1, round(window.duration_s / width_s / NUM_TIME_BUCKETS))
    num_bins = (int(window.duration_s / width_s / joined) + 1) * joined

    def counts(name: str) -> NDArray[np.int64]:
        found: NDArray[np.int64] = more.by_time.of(name, num_bins).reshape(-1, joined).sum(axis=1)
        return found

    requests = counts("requests")
    some = np.flatnonzero(requests)
    by_time = {name: counts(key)[some] / requests[some] for name, key in names.items()}
    arrivals = np.array([octave.num for octave in octaves.values()])
    by_length = {
        name: np.array([octave.met.get(key, 0) for octave in octaves.values()]) / arrivals
        for name, key in names.items()
    }
    return drawn_attainment(
        whole,
        Shares(window.start_s + (some + 0.5) * joined * width_s, by_time),
        Shares(np.array(list(octaves)), by_length),
        arrivals,
        window,
        slo,
    )


def _speculation(more: PlotsFold, end: RunRecords, window: Window) -> Chart | None:
    """Plots speculation; None if no draft tokens were verified. end: has the acceptance by place."""
    drafts = more.drafts
    if drafts is None or not drafts.has_passes or end.speculation is None:
        return None
    width_s = drafts.by_time.width_s
    joined = max(1, round(window.duration_s / width_s / NUM_BUCKETS))
    num_bins = (int(window.duration_s / width_s / joined) + 1) * joined
    accepted, passes = (
        drafts.by_time.of(name, num_bins).reshape(-1, joined).sum(axis=1) for name in OVER_TIME
    )
    middle_s = window.start_s + (np.arange(len(passes), dtype=np.float64) + 0.5) * joined * width_s
    return drawn_speculation(end, middle_s, accepted, passes, drafts.by_batch(), window)


def _ttft(more: PlotsFold, octaves: Mapping[int, Octave], slo: Slo | None) -> Chart:
    """Plots the sample of requests, and the percentiles of each octave."""
    lengths, ttft_s = more.requests.drawn()
    begun = {lower: octave.ttft for lower, octave in octaves.items() if octave.ttft.count}
    heights = [1e3 * sketch.percentiles(MARKED) for sketch in begun.values()]
    ttft_ms = 1e3 * ttft_s
    return drawn_ttft((lengths, ttft_ms), lengths, ttft_ms, np.array(list(begun)), heights, slo)


def over_time(plots: Plots, end: RunRecords, window: Window) -> Chart | None:
    """Plots the states of replicas and the rates; None for a run of 0 s."""
    if not end.end_s > 0:
        return None
    states = plots.more.states
    starts_s = np.arange(states.integrals.shape[2], dtype=np.float64) * states.width_s
    # The last interval is shorter if the run ends in it.
    width_s = np.clip(end.end_s - starts_s, 1e-9, states.width_s)
    panels, num_replicas = [], end.num_replicas
    for place, title in enumerate(STATES):
        mean, highest = states.integrals[place] / width_s, states.maxima[place]
        if num_replicas > MAX_REPLICAS_APART:
            named = {"all replicas": (mean.sum(axis=0) / num_replicas, highest.max(axis=0))}
        else:
            names = [f"replica {i}" for i in range(num_replicas)] if num_replicas > 1 else [""]
            named = {name: (mean[i], highest[i]) for i, name in enumerate(names)}
        panels.append(StateCurves(title, starts_s + states.width_s / 2, named))
    rates = rate_panels(
        _rate("output tokens", BLUE, plots.rates, "tokens", window.end_s),
        _rate("input tokens", PURPLE, plots.more.whole_run, "input_tokens", end.end_s),
        _rate("arrivals", ORANGE, plots.more.whole_run, "arrivals", end.end_s),
        _rate("finished", GREEN, plots.rates, "finished", window.end_s),
    )
    return drawn_timeline(panels, rates, end.end_s, window)


def _rate(name: str, colour: str, bins: Bins, key: str, end_s: float) -> Rate:
    """Returns a line from the bins that end before end_s."""
    num_bins = max(int((end_s - bins.start_s) / bins.width_s), 0)
    middle_s = bins.start_s + (np.arange(num_bins, dtype=np.float64) + 0.5) * bins.width_s
    return Rate(name, colour, middle_s, bins.of(key, num_bins) / bins.width_s)
