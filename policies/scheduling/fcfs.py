"""First come, first served, and the numbering of entries into a queue."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import ClassVar

from policies.core.sequence import SequenceView
from policies.scheduling import Scheduling


@dataclass(frozen=True, kw_only=True, slots=True)
class Fcfs(Scheduling):
    """Order of arrival. A preempted request keeps its position before all later arrivals.

    Memory pressure: the sequence that was admitted last is preempted. It is also the last arrival, unless a
    request was skipped while it waited for its adapter or a larger budget. Horizon: the order never changes
    by itself.
    """

    preempts_newest: ClassVar[bool] = True
    starvation_bound: ClassVar[int | None] = 0

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (arrival,)."""
        return (seq.request.arrival_s,)


class Entries:
    """A number per sequence: its place in the order of entry, unless `sort` changes it."""

    def __init__(self) -> None:
        self._num_entries = 0
        self._entries: dict[int, tuple[int, int]] = {}  # by request id: earlier preemptions, number

    def of(self, seq: SequenceView) -> int:
        """Returns the number of a sequence; one that entered since the last call gets the next number."""
        entry = self._entries.get(seq.request_id)
        if entry is None or entry[0] != seq.num_preemptions:
            entry = self._entries[seq.request_id] = seq.num_preemptions, self._num_entries
            self._num_entries += 1
        return entry[1]

    def sort(self, queue: SequenceOf[SequenceView]) -> set[int]:
        """Permutes the numbers of sequences so that they increase in this order; returns the moved ids."""
        moved = set()
        for seq, number in zip(queue, sorted(map(self.of, queue)), strict=True):
            if self._entries[seq.request_id][1] != number:
                self._entries[seq.request_id] = seq.num_preemptions, number
                moved.add(seq.request_id)
        return moved

    def forget(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._entries.pop(seq.request_id, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueOrder(Scheduling):
    """First come, first served, where a preempted request rejoins at the end.

    Order of entry into the queue: a preempted request waits behind all others (SGLang's `fcfs`).

    Memory pressure: the sequence that entered last is preempted, unless the batching policy chooses. Horizon:
    the order never changes by itself.
    """

    starvation_bound: ClassVar[int | None] = 0
    _entries: Entries = field(init=False, default_factory=Entries, repr=False, compare=False)

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (number of its last entry into the queue,)."""
        return (self._entries.of(seq),)

    def on_end(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._entries.forget(seq)
