"""Order of entry into the queue: a preempted request waits behind all others (SGLang's `fcfs`).

Memory pressure: the sequence that entered last is preempted, unless the batching policy chooses. Horizon: the
order never changes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from policies.core.sequence import SequenceView
from policies.scheduling import Scheduling
from policies.scheduling.entries import Entries


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueOrder(Scheduling):
    """First come, first served, where a preempted request comes again."""

    starvation_bound: ClassVar[int | None] = 0
    _entries: Entries = field(init=False, default_factory=Entries, repr=False, compare=False)

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (number of its last entry into the queue,)."""
        return (self._entries.of(seq),)

    def on_end(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._entries.forget(seq)
