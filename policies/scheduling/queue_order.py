"""Order of entry into the queue: a preempted request waits behind all others (SGLang's `fcfs`).

Memory pressure: the sequence that entered last is preempted, unless the batching policy chooses. Horizon: the
order never changes by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar

from policies.core.sequence_view import SequenceView
from policies.scheduling import Scheduling


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueOrder(Scheduling):
    """First come, first served, where a preempted request comes again."""

    starvation_bound: ClassVar[int | None] = 0
    _counter: Iterator[int] = field(init=False, default_factory=count, repr=False, compare=False)
    _entries: dict[int, tuple[int, int]] = field(init=False, default_factory=dict, repr=False, compare=False)
    """By request id: its preemptions so far, and the number of the entry after the last of them."""

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (number of its last entry into the queue,)."""
        entry = self._entries.get(seq.request_id)
        if entry is None or entry[0] != seq.num_preemptions:
            entry = self._entries[seq.request_id] = seq.num_preemptions, next(self._counter)
        return (entry[1],)

    def on_end(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._entries.pop(seq.request_id, None)
