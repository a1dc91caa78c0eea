"""Converts a recording to the tables by which simulated and measured runs are compared.

An iteration begins when the previous one was read, as long as there was work, and ends when its own tokens
are read. It thus includes the host's time between two launches, as a simulated iteration does; with overlap,
where the host works beside the device, it includes only the time for which the device waits.
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
from hwmodels.iterations import COUNTED
from sim.records.table import Gaps
from sim.speculation.log import DRAFT_WORK_COLUMNS

TIMES = ("arrival_s", "scheduled_s", "first_token_s", "last_token_s", "finished_s")
GROWING = ("decode_context_tokens", "kv_tokens_used")
"""Columns that grow by one token per sequence from one iteration of a launch to the next."""

LOADED_S = 1e-6
"""Duration of a copy between memory tiers while there is no other work; requests may arrive during it."""

JUST_S = 1e-7
"""A span in seconds just before a moment: longer than clocks' rounding, too short to matter."""


def begins_s(recording: Recording) -> NDArray[np.float64]:
    """Returns when each launch began, in seconds on the engine's clock, with shape [N]."""
    return np.array([one.time_s for one in plan_calls(recording) if one.is_planned], np.float64)


class PlanCall(NamedTuple):
    """One call of the policies.

    time_s: time of the call in an engine that spends no time between two launches. seen_s: a time at which
    such an engine may learn of a request so that it takes part in this plan, but not in the previous one.
    """

    time_s: float
    seen_s: float
    request_ids: tuple[int, ...]
    is_planned: bool


def plan_calls(recording: Recording) -> Iterator[PlanCall]:
    """Yields all calls of the policies in order, with and without a resulting plan."""
    steps = recording.steps
    events = {step: list(group) for step, group in groupby(recording.events, key=lambda event: event.step)}
    columns = (steps["start_s"], ends_s(recording), steps["num_left"], steps["num_iterations"])
    begin_s = before_s = -inf
    left_before, iterations_before = 0, 1
    for step, (start_s, end_s, num_left, num_iterations) in enumerate(zip(*columns, strict=True)):
        step_events = events.get(step, [])
        entered: list[int] = []
        due_s: float | None = None  # no work: the next call follows an event from outside
        seen_s = before_s
        if left_before > sum(event.kind == "leave" for event in step_events):
            # Any time during a running iteration will do: the next plan is made at its end.
            due_s, seen_s = before_s, before_s - (before_s - begin_s) / iterations_before / 2
        for event in step_events:
            if event.kind == "enter":
                entered.append(event.request_id)
            elif event.kind == "wait":
                one = _plan_call(max(event.now_s, before_s), due_s, seen_s, entered, is_planned=False)
                yield one
                entered = []
                if event.value is None:
                    due_s = None
                    continue
                if event.value:  # not seen earlier: the policies may wait for this very request
                    due_s = max(event.now_s + event.value, before_s)
                    seen_s = max(one.time_s, due_s - JUST_S)
                else:
                    due_s = seen_s = one.time_s + LOADED_S
        one = _plan_call(max(start_s, before_s), due_s, seen_s, entered, is_planned=True)
        yield one
        begin_s, before_s, left_before, iterations_before = one.time_s, end_s, num_left, num_iterations


def _plan_call(
    now_s: float, due_s: float | None, seen_s: float, entered: list[int], *, is_planned: bool
) -> PlanCall:
    """Builds a call. now_s: time of the real engine's call, when due or after an event from outside."""
    if due_s is None or now_s < due_s:
        return PlanCall(now_s, now_s, tuple(entered), is_planned)
    return PlanCall(due_s, seen_s, tuple(entered), is_planned)


def ends_s(recording: Recording) -> NDArray[np.float64]:
    """Returns when each launch's tokens were read, else when it was committed, in seconds, with shape [N]."""
    steps = recording.steps
    read_s: NDArray[np.float64] = steps["read_s"].fillna(steps["end_s"]).to_numpy(dtype=np.float64)
    return read_s


def until_s(recording: Recording) -> float | None:
    """Returns the end of a truncated recording, in seconds from its start; None if it is whole."""
    if recording.is_whole:
        return None
    return float(recording.steps["end_s"].max()) - float(recording.engine["start_s"])


def measured(recording: Recording, name: str = "measured") -> Measured:
    """Converts a recording to a measured run; times count from the run's start."""
    start_s = float(recording.engine["start_s"])
    requests = recording.requests.copy()
    for column in TIMES:
        requests[column] -= start_s
    notes: tuple[str, ...] = ()
    if pace := recording.engine.get("pace"):
        notes = (
            f"{name}: the machine took {pace['median']:.2f} times as long as during its calibration "
            "(80 % of the "
            f"time {pace['p10']:.2f} to {pace['p90']:.2f}); times are scaled to the calibration.",
        )
    if (attempts := recording.engine.get("attempts", 1)) > 1:
        notes += (f"{name}: the quietest of {attempts} runs, because the machine's pace varied.",)
    if not recording.is_whole:
        notes += (
            f"The recording of {name} is truncated: its first {len(recording.steps):,} steps are used.",
        )
    return Measured(
        name=name,
        requests=requests.sort_values(["arrival_s", "request_id"], ignore_index=True),
        gaps=_gaps(recording, start_s),
        iterations=_iterations(recording, start_s),
        num_kv_blocks=int(recording.engine["num_kv_blocks"]),
        notes=notes,
        block_size=int(recording.engine["block_size"]),
    )


def speculates(recording: Recording) -> bool:
    """Returns whether the engine speculated."""
    return bool((recording.steps["drafted_tokens"] > 0).any())


def _gaps(recording: Recording, start_s: float) -> Gaps | None:
    """Returns the gaps between the tokens that a user sees; tokens of one launch have gaps of 0.

    With speculation they are gaps between bursts, as vLLM counts ITL.
    """
    if not recording.token_times_s:
        return None
    bursts = np.unique if speculates(recording) else np.asarray
    every = (bursts(times_s) for times_s in recording.token_times_s.values())
    times_s = [one for one in every if len(one) > 1]
    gaps_s = [np.diff(one) for one in times_s]
    gap_s = np.concatenate(gaps_s) if gaps_s else np.zeros(0)
    end_s = np.concatenate([one[1:] for one in times_s]) - start_s if times_s else np.zeros(0)
    return Gaps(gap_s, np.ones(len(gap_s), np.int64), end_s)


def _iterations(recording: Recording, start_s: float) -> pd.DataFrame:
    """Returns one row per iteration; the iterations of one launch share its time evenly."""
    steps = recording.steps
    num = steps["num_iterations"].to_numpy()
    begin_s = begins_s(recording)
    each_s = (ends_s(recording) - begin_s) / num
    rows = np.repeat(np.arange(len(steps)), num)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(num) - num, num)
    columns = ["running", "waiting", "kv_blocks_used", "kv_tokens_used", "preempted", *COUNTED]
    if speculates(recording):
        columns += DRAFT_WORK_COLUMNS
    table = steps[columns].iloc[rows].reset_index(drop=True)
    for column in GROWING:
        table[column] += nth * table["decode_seqs"]
    table.insert(0, "replica", 0)
    table.insert(1, "iteration", np.arange(len(rows)))
    table.insert(2, "start_s", begin_s[rows] + nth * each_s[rows] - start_s)
    table.insert(3, "duration_s", each_s[rows])
    return table
