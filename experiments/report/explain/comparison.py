"""Compares the phases of one request with those of all requests of its run."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from experiments.report.explain.run_folder import RequestStory
from sim.records.event_rows import WAITS
from sim.report import numbers, wording
from sim.report.numbers import MISSING

PHASES = {
    "queue": "queue, from arrival to start",
    "prefill": "prefill, from start to first token",
    "decode": "decode, from first to last token",
}
"""Phases whose times add up to E2E."""
ALWAYS = (*PHASES, "e2e", "ttft", "tpot", "prompt_tokens", "output_tokens")
"""Figures that are shown even if they are 0."""
MUCH = 1.1
"""Ratio to the mean from which a phase is called longer."""
LENGTHS = {"prefill": ("prompt_tokens", "prompt"), "decode": ("output_tokens", "output")}
"""Phase -> the figure that makes it long, and the part of the request that has these tokens."""


class Compared(NamedTuple):
    """A figure of the request, its mean and its 99th percentile over the run; NaN if it does not exist."""

    name: str
    value: float
    mean: float
    p99: float


def compare(story: RequestStory) -> dict[str, Compared]:
    """Returns times in seconds and numbers of tokens; those that are 0 for all requests are left out."""
    own, run = _columns(pd.DataFrame([story.request])), _columns(story.measured)
    found = {}
    for name, values in run.items():
        known = values[~np.isnan(values)]
        mean, p99 = (float(known.mean()), float(np.percentile(known, 99))) if len(known) else (math.nan,) * 2
        value = float(own[name][0])
        if name in ALWAYS or value > 0 or mean > 0:
            found[name] = Compared(name, value, mean, p99)
    return found


def compared_rows(story: RequestStory) -> list[list[str]]:
    """Returns the table: the heading, then one row per figure; times in milliseconds."""
    rows = [["ms", "this request", "mean of the run", "p99 of the run"]]
    for one in compare(story).values():
        is_time = not one.name.endswith("_tokens")
        own = MISSING if math.isnan(one.value) else f"{one.value:,.0f}"
        own = _milliseconds(one.value) if is_time else own
        over_run = (one.mean, one.p99)
        rows.append([_label(one.name), own, *(map(_milliseconds if is_time else _count, over_run))])
    return rows


def compared_sentence(story: RequestStory) -> str:
    """Returns a sentence on E2E and the phases that are longer than the run's mean; empty without phases."""
    found = compare(story)
    phases = [found[name] for name in PHASES if not math.isnan(found[name].value)]
    if not phases or len(story.measured) < 2:
        return ""
    start = f"Compared with the {len(story.measured):,} requests of the run: "
    e2e = found["e2e"]
    if not math.isnan(e2e.value):
        start += f"E2E is {_milliseconds(e2e.value)} ms (mean {_milliseconds(e2e.mean)} ms); "
    longer = [one for one in phases if one.value > MUCH * one.mean]
    if not longer:
        return f"{start}no phase takes much longer than on average."
    longer.sort(key=lambda one: one.mean - one.value)
    return f"{start}longer than on average: {'; '.join(_longer(one, found) for one in longer)}."


def _longer(one: Compared, found: dict[str, Compared]) -> str:
    times = f"{numbers.number(one.value / one.mean)} times the mean" if one.mean > 0 else "the mean is 0"
    rare = ", above p99" if one.value > one.p99 else ""
    tokens, what = LENGTHS.get(one.name, ("", ""))
    length = found.get(tokens)
    because = ""
    if length is not None and length.value > MUCH * length.mean:
        because = f" (its {what} has {numbers.number(length.value / length.mean)} times the mean tokens)"
    return f"{one.name} {_milliseconds(one.value)} ms, {times}{rare}{because}"


def _milliseconds(value_s: float) -> str:
    return MISSING if math.isnan(value_s) else numbers.milliseconds(value_s)


def _count(value: float) -> str:
    return MISSING if math.isnan(value) else numbers.number(value)


def _columns(table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Returns the compared figures of every row, in seconds or tokens; NaN for a phase without an end.

    The requests of an observed server have no causes of waits.
    """

    def column(name: str) -> np.ndarray:
        return table[name].to_numpy(np.float64)

    arrival_s, start_s = column("arrival_s"), column("scheduled_s")
    first_s, last_s = column("first_token_s"), column("last_token_s")
    return {
        "queue": start_s - arrival_s,
        "prefill": first_s - start_s,
        "decode": last_s - first_s,
        **{name: column(f"{name}_s") for name in ("e2e", "ttft", "tpot")},
        **{cause: column(f"wait_{cause}_s") for cause in ("gateway", *WAITS) if f"wait_{cause}_s" in table},
        **{name: column(name) for name in ("prompt_tokens", "cached_tokens", "output_tokens")},
    }


def _label(name: str) -> str:
    if name in PHASES:
        return PHASES[name]
    if name in wording.WAITS:
        return f"waiting: {wording.WAITS[name]}"
    if name.endswith("_tokens"):
        return f"number of {name.replace('_', ' ')}"
    return wording.LATENCIES[name]
