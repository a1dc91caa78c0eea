"""The waiting queue of an engine with adapters: by rank, and by rank among the sequences of each adapter."""

from __future__ import annotations

from collections.abc import Collection

from policies.core.sequence_view import SequenceView
from policies.core.waiting import Key, WaitingQueue


class AdapterQueue(WaitingQueue):
    """A waiting queue by rank, which is also kept by adapter. Adapter None: sequences without one."""

    def __init__(self) -> None:
        super().__init__()
        self._by_adapter: dict[str | None, WaitingQueue] = {}  # none is empty

    def push(self, seq: SequenceView) -> None:
        """Queues a sequence after those of smaller rank."""
        super().push(seq)
        self._by_adapter.setdefault(seq.request.adapter, WaitingQueue()).push(seq)

    def remove(self, seq: SequenceView) -> None:
        """Removes a sequence. Raises KeyError if it is not here."""
        super().remove(seq)
        queue = self._by_adapter[seq.request.adapter]
        queue.remove(seq)
        if not queue:
            del self._by_adapter[seq.request.adapter]

    def after_of(self, key: Key | None, adapters: Collection[str | None]) -> SequenceView | None:
        """Returns the first sequence behind a key that needs one of some adapters; key=None: the first."""
        queues = self._by_adapter
        found = [queues[name].after(key) for name in adapters if name in queues]
        return min((seq for seq in found if seq is not None), key=_key, default=None)


def _key(seq: SequenceView) -> Key:
    return seq.rank, seq.request_id
