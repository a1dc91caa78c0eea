"""Numbers the entries of sequences into the waiting queue; a preempted sequence enters again."""

from __future__ import annotations

from policies.core.sequence_view import SequenceView


class Entries:
    """The number of each sequence's last entry into the queue."""

    def __init__(self) -> None:
        self._num_entries = 0
        self._entries: dict[int, tuple[int, int]] = {}  # by request id: preemptions before it, its number

    def of(self, seq: SequenceView) -> int:
        """Returns the number of a sequence's last entry, which is a new one if there is none since."""
        entry = self._entries.get(seq.request_id)
        if entry is None or entry[0] != seq.num_preemptions:
            entry = self._entries[seq.request_id] = seq.num_preemptions, self._num_entries
            self._num_entries += 1
        return entry[1]

    def forget(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._entries.pop(seq.request_id, None)
