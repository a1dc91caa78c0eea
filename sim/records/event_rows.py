"""Rows of the event log: events of sequences, columns, the table of all replicas, and waiting times."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from sys import byteorder
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sim.records.mapped_buffers import MappedBuffers
from sim.records.table import Table, joined

WAITS = ("frontend", "iteration", "slot", "budget", "memory", "policy", "adapter", "load")
"""Waiting causes. frontend: the request has not reached the engine yet; load: its KV is being copied from
another tier, or its adapter is being loaded; for the others see `policies.core.plan.Cause`.
"""
WAIT_COLUMNS = tuple(f"wait_{cause}_s" for cause in WAITS)
_COLUMNS_OF_WAITS = ["replica", "request_id", *WAIT_COLUMNS]
TIERS = ("", "gpu", "host", "disk", "remote", "mirror", "live")


class Event(IntEnum):
    """Kinds of events. The comments define `tokens` and `of_tokens`, which are 0 unless mentioned."""

    arrive = 0  # tokens: prompt tokens
    first_token = 1
    load = 2  # has slot and blocks; tokens: KV being copied from `tier`, of all known; 0: an adapter
    swap_in = 3  # as load, for KV that a preemption has swapped out
    loaded = 4  # the KV has arrived
    admit = 5  # is scheduled; tokens: KV that need not be computed, of all known tokens
    resume = 6  # as admit, after a preemption; recomputed_tokens: tokens that are computed again
    resume_swapped = 7  # as resume, after its KV was swapped in
    prefilled = 8  # has recomputed all lost KV, and produced a token
    preempt = 9  # lost slot and KV; tokens: computed, of all known; by: request that needed the memory
    preempt_swap = 10  # as preempt, with its KV moved to host memory
    pause = 11  # a policy has paused it; it keeps slot and KV
    unpause = 12
    store = 13  # no sequence; tokens: KV copied to `tier`, by a swap-out or a cache
    unserved = 14  # ends the wait of a request that was aborted, or waits when the run ends
    end = 15
    lost = 16  # its replica crashed; ends its wait, if it was waiting
    hand_over = 17  # stops for its transfer to another replica; tokens: KV here, of all known tokens
    adopt = 18  # is scheduled in the other replica; tokens: KV there, of all known tokens
    timed_out = 19  # its client timed out and may retry; tokens: output tokens that are lost


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
"""An admission by the first plan that included the request, which has waited only for that plan."""
NO_WAIT: Final = (0.0,) * len(WAITS)
_PACK: Final = Struct(f"=dqbbiiiq{len(WAITS)}d").pack
_PACK_ADMIT: Final = Struct("=dqiidd").pack


class EventRows:
    """The rows of one replica, in the order of writing. Most are such admissions, in a shorter format."""

    def __init__(self) -> None:
        self._admits = bytearray()
        self._others = bytearray()
        self._places = bytearray()  # for each other row, the number of admissions before it
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
        """Adds the row of a sequence that was admitted by the first plan that included it."""
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
        """Adds the row of any other event. waited_s: seconds in the order of `WAITS`."""
        row = (time_s, request_id, event, tier, tokens, of_tokens, recomputed_tokens, by)
        self._others += _PACK(*row, *waited_s)
        num_before = (self._buffers.num_moved + len(self._admits)) // ADMIT_ROW.itemsize
        self._places += num_before.to_bytes(8, byteorder)

    def extend(self, other: EventRows) -> None:
        """Adds the rows of another replica."""
        num_before = self._buffers.num_bytes(self._admits) // ADMIT_ROW.itemsize
        num_places = self._buffers.num_bytes(self._places) // 8
        self._buffers.extend(other._buffers)
        if num_before:
            np.frombuffer(self._places, np.int64)[num_places:] += num_before

    @property
    def num_bytes(self) -> int:
        """Memory of the rows, bytes."""
        return self._buffers.num_all_bytes()

    def __len__(self) -> int:
        admits, others = self._buffers.num_bytes(self._admits), self._buffers.num_bytes(self._others)
        return admits // ADMIT_ROW.itemsize + others // ROW.itemsize

    def fill(self, columns: dict[str, NDArray[Any]]) -> None:
        """Fills columns of zeros with one value per row. The rows are dropped."""
        admits, others = self._buffers.take(self._admits, ADMIT_ROW), self._buffers.take(self._others, ROW)
        places = self._buffers.take(self._places, np.int64) + np.arange(len(others))
        is_admit = np.ones(len(admits) + len(others), bool)
        is_admit[places] = False
        columns["event"][is_admit] = Event.admit
        columns["by"][is_admit] = -1
        for name in ADMIT_ROW.names or ():
            columns[name][is_admit] = admits[name]
        for name in ROW.names or ():
            if others[name].any():  # otherwise the memory of the column stays untouched
                columns[name][places] = others[name]


def logged_events(logs: list[EventRows]) -> Table:
    """Returns the rows of all replicas, events and tiers as numbers. The rows of the logs are dropped."""
    sizes = [len(log) for log in logs]
    columns = {name: np.zeros(sum(sizes), ROW[name]) for name in ROW.names or ()}
    end = 0
    for log, size in zip(logs, sizes, strict=True):
        end += size
        log.fill({name: column[end - size : end] for name, column in columns.items()})
    replica = np.repeat(np.arange(len(logs), dtype=np.int32), sizes)
    return Table({"replica": replica, **columns})


def joined_events(logs: Sequence[EventRows]) -> Table:
    """Returns the same as `logged_events`, at the cost of one log. The rows of the logs are dropped."""
    whole, sizes = EventRows(), [len(log) for log in logs]
    for log in logs:
        whole.extend(log)
    return logged_events([whole]).assign(replica=np.repeat(np.arange(len(logs), dtype=np.int32), sizes))


def waits_by_request(events: Table, request_ids: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Returns the seconds that each request waited, over all its waits, by column of `WAIT_COLUMNS`."""
    ids_of_events = events["request_id"]
    size = int(max(request_ids.max(initial=-1), ids_of_events.max(initial=-1))) + 1
    is_of_request = ids_of_events >= 0
    ids = ids_of_events[is_of_request]
    places = request_ids
    if size > 4 * len(request_ids) and np.isin(ids, request_ids).all():  # a shard's ids have large gaps
        ids, places, size = np.searchsorted(request_ids, ids), np.arange(len(request_ids)), len(request_ids)
    found: dict[str, NDArray[np.float64]] = {}
    for name in WAIT_COLUMNS:
        waited_s = events[name][is_of_request]
        if waited_s.any():
            found[name] = np.bincount(ids, waited_s, minlength=size)[places].astype(np.float64)
        else:
            found[name] = np.zeros(len(request_ids))
    return found


class PendingWaits:
    """The events with a waiting time, for requests whose rows have not been taken.

    The waiting times are kept one by one instead of as sums, because `waits_by_request` adds them replica by
    replica, and the last bit of a sum depends on the order.
    """

    def __init__(self) -> None:
        self._waits: list[Table] = []

    def add(self, events: Table) -> None:
        """Adds the waiting times of events, which on each replica are later than those of earlier calls."""
        waits = events[_COLUMNS_OF_WAITS]
        is_wait: NDArray[np.bool_] = np.any([waits[name] for name in WAIT_COLUMNS], axis=0)
        is_wait &= events["request_id"] >= 0
        self._waits.append(waits[is_wait])

    def take(self, request_ids: NDArray[np.int64], end: int) -> dict[str, NDArray[np.float64]]:
        """Returns the seconds that requests waited, by column of `WAIT_COLUMNS`, and drops ids below `end`.

        request_ids: arrived requests with ids below `end`, ascending.
        """
        waits = joined(self._waits)
        is_taken = waits["request_id"] < end
        self._waits = [waits[~is_taken]]
        taken = waits[is_taken]
        taken = taken.take(np.argsort(taken["replica"], kind="stable"))
        first = int(request_ids[0]) if len(request_ids) else 0
        ids = taken["request_id"] - first
        return waits_by_request(taken.assign(request_id=ids), request_ids - first)
