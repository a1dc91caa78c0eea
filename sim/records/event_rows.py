"""What happened to each sequence, as rows: what they say, and how the logs of all replicas become a table."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from sys import byteorder
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.records.mapped_buffers import MappedBuffers

WAITS = ("frontend", "iteration", "slot", "budget", "memory", "policy", "adapter", "load")
"""Causes of a wait. frontend: the engine does not know the request yet; load: its KV is on its way from
another tier, or its adapter is; the others: `policies.core.plan.Cause`."""
WAIT_COLUMNS = tuple(f"wait_{cause}_s" for cause in WAITS)
TIERS = ("", "gpu", "host", "disk", "remote", "mirror")


class Event(IntEnum):
    """What happened; after it what `tokens` and `of_tokens` mean, 0 where nothing is said."""

    arrive = 0  # tokens: of the prompt
    first_token = 1
    load = 2  # got slot and blocks; tokens: KV on its way from `tier`, of all known; 0: its adapter is
    swap_in = 3  # the same for KV that a preemption had swapped out
    loaded = 4  # that KV is there
    admit = 5  # work on it begins; tokens: KV that need not be computed, of all known tokens
    resume = 6  # the same after a preemption; recomputed_tokens: computed a second time
    resume_swapped = 7  # the same, its KV having been swapped in
    prefilled = 8  # all that it lost is computed again, and a token more is out
    preempt = 9  # lost slot and KV; tokens: computed so far, of all known tokens; by: who needed the room
    preempt_swap = 10  # the same, its KV moved to host memory
    pause = 11  # a policy makes it stand still; it keeps slot and KV
    unpause = 12
    store = 13  # of no sequence; tokens: KV copied to `tier`, swapped out or stored by the cache
    unserved = 14  # the wait of a request that was given up, or that still waited when the run ended
    end = 15
    lost = 16  # its replica crashed; the wait until then, if it was waiting
    hand_over = 17  # it is to go on in another replica; tokens: whose KV is here, of all known tokens
    adopt = 18  # work goes on in that other replica; tokens: whose KV is there, of all known tokens
    timed_out = 19  # its client has left, and may come again; tokens: of the answer, lost


ROW = np.dtype(
    [
        ("time_s", "f8"),
        ("request_id", "i8"),
        ("event", "i1"),
        ("tier", "i1"),
        ("tokens", "i4"),
        ("of_tokens", "i4"),
        ("recomputed_tokens", "i4"),
        ("by", "i8"),
        *((name, "f8") for name in WAIT_COLUMNS),
    ]
)
_ADMIT_NAMES = ("time_s", "request_id", "tokens", "of_tokens", *WAIT_COLUMNS[:2])
ADMIT_ROW = np.dtype([(name, ROW[name]) for name in _ADMIT_NAMES])
"""An admission by the first plan that saw the request, which has waited for nothing but that plan."""
NO_WAIT: Final = (0.0,) * len(WAITS)
_PACK: Final = Struct(f"=dqbbiiiq{len(WAITS)}d").pack
_PACK_ADMIT: Final = Struct("=dqiidd").pack


class EventRows:
    """The rows of one replica, in the order of their writing. Most tell of such admissions, and are short."""

    def __init__(self) -> None:
        self._admits = bytearray()
        self._others = bytearray()
        self._places = bytearray()  # of each of the others: the number of admissions before it
        self._buffers = MappedBuffers(self._admits, self._others, self._places)

    def admit(
        self,
        time_s: float,
        request_id: int,
        tokens: int,
        of_tokens: int,
        frontend_s: float,
        iteration_s: float,
    ) -> None:
        """Work on a sequence begins that was admitted by the first plan that saw it."""
        self._admits += _PACK_ADMIT(time_s, request_id, tokens, of_tokens, frontend_s, iteration_s)
        if len(self._admits) >= self._buffers.limit:
            self._buffers.move()

    def add(
        self,
        event: Event,
        time_s: float,
        request_id: int,
        tokens: int = 0,
        of_tokens: int = 0,
        waited_s: tuple[float, ...] = NO_WAIT,
        *,
        tier: int = 0,
        recomputed_tokens: int = 0,
        by: int = -1,
    ) -> None:
        """Anything else has happened. waited_s: in the order of `WAITS`."""
        row = (time_s, request_id, event, tier, tokens, of_tokens, recomputed_tokens, by)
        self._others += _PACK(*row, *waited_s)
        num_before = (self._buffers.num_moved + len(self._admits)) // ADMIT_ROW.itemsize
        self._places += num_before.to_bytes(8, byteorder)

    def __len__(self) -> int:
        admits, others = self._buffers.num_bytes(self._admits), self._buffers.num_bytes(self._others)
        return admits // ADMIT_ROW.itemsize + others // ROW.itemsize

    def fill(self, columns: dict[str, NDArray[Any]]) -> None:
        """Fill columns, zeros until now, with a value a row. The rows are given up."""
        admits, others = self._buffers.take(self._admits, ADMIT_ROW), self._buffers.take(self._others, ROW)
        places = self._buffers.take(self._places, np.int64) + np.arange(len(others))
        is_admit = np.ones(len(admits) + len(others), bool)
        is_admit[places] = False
        columns["event"][is_admit] = Event.admit
        columns["by"][is_admit] = -1
        for name in ADMIT_ROW.names or ():
            columns[name][is_admit] = admits[name]
        for name in ROW.names or ():
            if others[name].any():  # else the column's memory stays untouched
                columns[name][places] = others[name]


def logged_events(logs: list[EventRows]) -> pd.DataFrame:
    """The rows of all replicas, with the replica's index; events and tiers as numbers. They are given up."""
    sizes = [len(log) for log in logs]
    columns = {name: np.zeros(sum(sizes), ROW[name]) for name in ROW.names or ()}
    end = 0
    for log, size in zip(logs, sizes, strict=True):
        end += size
        log.fill({name: column[end - size : end] for name, column in columns.items()})
    replica = np.repeat(np.arange(len(logs), dtype=np.int32), sizes)
    return pd.DataFrame({"replica": replica, **columns}, copy=False)


def waits_by_request(events: pd.DataFrame, request_ids: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Seconds that each request waited, by column of `WAIT_COLUMNS`, over all its waits."""
    mine = events["request_id"].to_numpy()
    size = int(max(request_ids.max(initial=-1), mine.max(initial=-1))) + 1
    waited = mine >= 0
    ids = mine[waited]
    found: dict[str, NDArray[np.float64]] = {}
    for name in WAIT_COLUMNS:
        waited_s = events[name].to_numpy()[waited]
        if waited_s.any():
            found[name] = np.bincount(ids, waited_s, minlength=size)[request_ids].astype(np.float64)
        else:
            found[name] = np.zeros(len(request_ids))
    return found
