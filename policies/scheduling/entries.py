"""Places of sequences in a queue that is sorted in place; a preempted sequence enters again at the end."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from policies.core.sequence import SequenceView


class Entries:
    """A number per sequence: its place in the order of entry, unless `sort` gives it another one."""

    def __init__(self) -> None:
        self._num_entries = 0
        self._entries: dict[int, tuple[int, int]] = {}  # by request id: preemptions before it, its number

    def of(self, seq: SequenceView) -> int:
        """Returns the number of a sequence; one that has entered since the last call gets the next one."""
        entry = self._entries.get(seq.request_id)
        if entry is None or entry[0] != seq.num_preemptions:
            entry = self._entries[seq.request_id] = seq.num_preemptions, self._num_entries
            self._num_entries += 1
        return entry[1]

    def sort(self, queue: SequenceOf[SequenceView]) -> set[int]:
        """Exchanges the numbers of sequences so that they rise in this order; returns the ids that moved."""
        moved = set()
        for seq, number in zip(queue, sorted(map(self.of, queue)), strict=True):
            if self._entries[seq.request_id][1] != number:
                self._entries[seq.request_id] = seq.num_preemptions, number
                moved.add(seq.request_id)
        return moved

    def forget(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._entries.pop(seq.request_id, None)
