"""A recording as a run among others: the tables that simulated and measured runs are compared by.

An iteration begins when the one before it was read, as long as there was anything to do, and ends when its
own tokens are there. So it holds the host's time between two launches, as a simulated iteration does; with
overlap, where the host works beside the device, only what the device waits for.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.validate.measured import Measured
from experiments.validate_engine.recording import Recording
from hwmodels.iteration import IterationShape
from sim.records import Gaps

TIMES = ("arrival_s", "scheduled_s", "first_token_s", "last_token_s", "finished_s")
GROWING = ("decode_context_tokens", "kv_tokens_used")
"""By a token a sequence, from one iteration of a launch to the next."""


def begins_s(recording: Recording) -> NDArray[np.float64]:
    """When each launch began, on the engine's clock. [N]"""
    steps = recording.steps
    start_s, num_left = steps["start_s"].to_numpy(), steps["num_left"].to_numpy()
    waits, leaves = np.zeros(len(steps), bool), np.zeros(len(steps), np.int64)
    for event in recording.events:
        if event.step < len(steps):
            waits[event.step] |= event.kind == "wait"
            leaves[event.step] += event.kind == "leave"
    before_s, left_before = np.roll(ends_s(recording), 1), np.roll(num_left, 1)
    is_busy = (left_before > leaves) & ~waits
    is_busy[:1] = False
    begin_s: NDArray[np.float64] = np.where(is_busy, before_s, start_s)
    begin_s[1:] = np.maximum(begin_s[1:], before_s[1:])  # of a step that is launched ahead
    return begin_s


def ends_s(recording: Recording) -> NDArray[np.float64]:
    """When each launch's tokens were there; of one that was never read, when it was committed. [N]"""
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
    if not recording.is_whole:
        notes = (f"The recording of {name} was cut short: {len(recording.steps):,} steps of it are used.",)
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
    columns = ["running", "waiting", "kv_blocks_used", "kv_tokens_used", "preempted", *IterationShape._fields]
    table = steps[columns].iloc[rows].reset_index(drop=True)
    for column in GROWING:
        table[column] += nth * table["decode_seqs"]
    table.insert(0, "replica", 0)
    table.insert(1, "iteration", np.arange(len(rows)))
    table.insert(2, "start_s", begin_s[rows] + nth * each_s[rows] - start_s)
    table.insert(3, "duration_s", each_s[rows])
    return table
