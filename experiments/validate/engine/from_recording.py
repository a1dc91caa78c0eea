"""A recording as a run among others: the tables that simulated and measured runs are compared by.

An iteration begins when the one before it was read, as long as there was anything to do, and ends when its
own tokens are there. So it holds the host's time between two launches, as a simulated iteration does; with
overlap, where the host works beside the device, only what the device waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import inf
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.validate.engine.recording import Recording
from experiments.validate.fidelity.measured import Measured
from hwmodels.iterations.iteration import COUNTED
from sim.records.iterations import Gaps

TIMES = ("arrival_s", "scheduled_s", "first_token_s", "last_token_s", "finished_s")
GROWING = ("decode_context_tokens", "kv_tokens_used")
"""By a token a sequence, from one iteration of a launch to the next."""

LOADED_S = 1e-6
"""What a copy between memory tiers counts as where nothing else was to be done: requests may come in it."""

JUST_S = 1e-7
"""Before a moment: more than what clocks round, less than anybody sees."""


def begins_s(recording: Recording) -> NDArray[np.float64]:
    """Returns when each launch began, in seconds on the engine's clock, with shape [N]."""
    return np.array([one.time_s for one in asked(recording) if one.is_planned], np.float64)


class Asked(NamedTuple):
    """Once that the policies were asked.

    time_s: when an engine would have asked that takes no time between two launches. seen_s: a moment at which
    such an engine may learn of a request, and lets it take part in this plan, not in the one before.
    """

    time_s: float
    seen_s: float
    request_ids: tuple[int, ...]
    is_planned: bool


def asked(recording: Recording) -> Iterator[Asked]:
    """Every plan that was made, and those that came to nothing, in order."""
    steps = recording.steps
    events = {step: list(group) for step, group in groupby(recording.events, key=lambda event: event.step)}
    columns = (steps["start_s"], ends_s(recording), steps["num_left"], steps["num_iterations"])
    begin_s = before_s = -inf
    left_before, iterations_before = 0, 1
    for step, (start_s, end_s, num_left, num_iterations) in enumerate(zip(*columns, strict=True)):
        step_events = events.get(step, [])
        entered: list[int] = []
        due_s: float | None = None  # nothing to do: when something comes from outside
        seen_s = before_s
        if left_before > sum(event.kind == "leave" for event in step_events):
            # While an iteration is under way any moment of it will do: the next plan is made at its end.
            due_s, seen_s = before_s, before_s - (before_s - begin_s) / iterations_before / 2
        for event in step_events:
            if event.kind == "enter":
                entered.append(event.request_id)
            elif event.kind == "wait":
                one = _asked(max(event.now_s, before_s), due_s, seen_s, entered, is_planned=False)
                yield one
                entered = []
                if event.value is None:
                    due_s = None
                    continue
                if event.value:  # seen no earlier: a request may be what they wait for
                    due_s = max(event.now_s + event.value, before_s)
                    seen_s = max(one.time_s, due_s - JUST_S)
                else:
                    due_s = seen_s = one.time_s + LOADED_S
        one = _asked(max(start_s, before_s), due_s, seen_s, entered, is_planned=True)
        yield one
        begin_s, before_s, left_before, iterations_before = one.time_s, end_s, num_left, num_iterations


def _asked(
    now_s: float, due_s: float | None, seen_s: float, entered: list[int], *, is_planned: bool
) -> Asked:
    """now_s: when the real engine asked, because it was due, or because something had come before that."""
    if due_s is None or now_s < due_s:
        return Asked(now_s, now_s, tuple(entered), is_planned)
    return Asked(due_s, seen_s, tuple(entered), is_planned)


def ends_s(recording: Recording) -> NDArray[np.float64]:
    """Returns when each launch's tokens were read, else when it was committed, in seconds, with shape [N]."""
    steps = recording.steps
    read_s: NDArray[np.float64] = steps["read_s"].fillna(steps["end_s"]).to_numpy(dtype=np.float64)
    return read_s


def until_s(recording: Recording) -> float | None:
    """When a recording that was cut short ends, from the beginning of its run; None: all is there."""
    if recording.is_whole:
        return None
    return float(recording.steps["end_s"].max()) - float(recording.engine["start_s"])


def measured(recording: Recording, name: str = "measured") -> Measured:
    """All times from the beginning of the run, `start_s` of what the recording says of its engine."""
    start_s = float(recording.engine["start_s"])
    requests = recording.requests.copy()
    for column in TIMES:
        requests[column] -= start_s
    notes: tuple[str, ...] = ()
    if pace := recording.engine.get("pace"):
        notes = (
            f"{name}: the machine took {pace['median']:.2f} times as long as in its calibration (80 % of the "
            f"time {pace['p10']:.2f} to {pace['p90']:.2f}); times are as they would have been there.",
        )
    if not recording.is_whole:
        notes += (f"The recording of {name} was cut short: {len(recording.steps):,} steps of it are used.",)
    return Measured(
        name=name,
        requests=requests.sort_values(["arrival_s", "request_id"], ignore_index=True),
        gaps=_gaps(recording, start_s),
        iterations=_iterations(recording, start_s),
        num_kv_blocks=int(recording.engine["num_kv_blocks"]),
        notes=notes,
        block_size=int(recording.engine["block_size"]),
    )


def _gaps(recording: Recording, start_s: float) -> Gaps | None:
    """Between the tokens that a user sees; those of one launch have gaps of 0."""
    if not recording.token_times_s:
        return None
    times_s = [np.asarray(times_s) for times_s in recording.token_times_s.values() if len(times_s) > 1]
    gaps_s = [np.diff(one) for one in times_s]
    gap_s = np.concatenate(gaps_s) if gaps_s else np.zeros(0)
    end_s = np.concatenate([one[1:] for one in times_s]) - start_s if times_s else np.zeros(0)
    return Gaps(gap_s, np.ones(len(gap_s), np.int64), end_s)


def _iterations(recording: Recording, start_s: float) -> pd.DataFrame:
    """One row an iteration; those of one launch share its time evenly."""
    steps = recording.steps
    num = steps["num_iterations"].to_numpy()
    begin_s = begins_s(recording)
    each_s = (ends_s(recording) - begin_s) / num
    rows = np.repeat(np.arange(len(steps)), num)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(num) - num, num)
    columns = ["running", "waiting", "kv_blocks_used", "kv_tokens_used", "preempted", *COUNTED]
    table = steps[columns].iloc[rows].reset_index(drop=True)
    for column in GROWING:
        table[column] += nth * table["decode_seqs"]
    table.insert(0, "replica", 0)
    table.insert(1, "iteration", np.arange(len(rows)))
    table.insert(2, "start_s", begin_s[rows] + nth * each_s[rows] - start_s)
    table.insert(3, "duration_s", each_s[rows])
    return table
