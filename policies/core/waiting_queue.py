"""The waiting queue of an engine: sequences without KV in the order of their rank, also per adapter.

A scheduling policy may provide its own queue (`Scheduling.queue`), a subclass of `WaitingQueue`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator

from policies.core.sequence import Sequence, SequenceView

Key = tuple[tuple[float, ...], int]  # rank, request id
_Entry = tuple[tuple[float, ...], int, SequenceView]  # rank, request id, sequence
_MAX_BLOCK = 512  # entries at which a block is split


class WaitingQueue:
    """Sequences by (rank, request id), in sorted blocks. A rank must not change while its sequence is here.

    A push, a removal and `after` take O(log n) and move the entries of one block. Iteration takes O(1) for
    each sequence; sequences may be pushed and removed meanwhile, and it continues after the last one.
    """

    def __init__(self) -> None:
        self._blocks: list[list[_Entry]] = []  # none is empty
        self._entry_of: dict[int, _Entry] = {}  # by request id
        self._num_changes = 0

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, Sequence) and seq.request_id in self._entry_of

    @property
    def first(self) -> SequenceView | None:
        """The sequence of smallest rank; None if the queue is empty."""
        return self._blocks[0][0][2] if self._blocks else None

    def push(self, seq: SequenceView) -> None:
        """Queues a sequence after those of smaller rank."""
        self._entry_of[seq.request_id] = entry = (seq.rank, seq.request_id, seq)
        self._num_changes += 1
        blocks = self._blocks
        if not blocks:
            blocks.append([entry])
            return
        index = len(blocks) - 1
        block = blocks[index]
        if block[-1] < entry:  # the common case: the last arrival
            block.append(entry)
        else:
            index, place = self._find(entry)
            block = blocks[index]
            block.insert(place, entry)
        if len(block) > _MAX_BLOCK:
            half = len(block) // 2
            blocks[index : index + 1] = [block[:half], block[half:]]

    def remove(self, seq: SequenceView) -> None:
        """Removes a sequence. Raises KeyError if it is not here."""
        entry = self._entry_of.pop(seq.request_id)
        self._num_changes += 1
        index, place, block = 0, 0, self._blocks[0]
        if block[0][2] is not seq:
            index, place = self._find(entry)
            block = self._blocks[index]
            if place == len(block) or block[place][2] is not seq:
                raise ValueError(
                    f"rank={entry[0]} of request {entry[1]}: must have an order, so must not be nan"
                )
        del block[place]
        if not block:
            del self._blocks[index]

    def after(self, key: Key | None) -> SequenceView | None:
        """Returns the first sequence after a key, which may be absent; key=None: the first of all."""
        if key is None or not self._blocks:
            return self.first
        index, place = self._find((key[0], key[1] + 1))
        block = self._blocks[index]
        return block[place][2] if place < len(block) else None

    def __iter__(self) -> Iterator[SequenceView]:
        blocks, index, place = self._blocks, 0, 0
        while index < len(blocks):
            block = blocks[index]
            if place == len(block):
                index, place = index + 1, 0
                continue
            entry, num_changes = block[place], self._num_changes
            yield entry[2]
            if self._num_changes == num_changes:
                place += 1
            elif blocks:
                index, place = self._find((entry[0], entry[1] + 1))

    def _find(self, key: Key | _Entry) -> tuple[int, int]:
        """Returns the block and the place in it of the first entry that is not before a key.

        If there is none: the end of the last block.
        """
        blocks = self._blocks
        index = bisect_left(blocks, key, hi=len(blocks) - 1, key=_last)
        return index, bisect_left(blocks[index], key)


def _last(block: list[_Entry]) -> _Entry:
    return block[-1]


class AdapterQueue(WaitingQueue):
    """A waiting queue by rank, also indexed by adapter. Adapter None: sequences without an adapter."""

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

    def of(self, open_adapters: Callable[[], Collection[str | None] | None]) -> Iterator[SequenceView]:
        """Yields the sequences whose adapter is open, in order; the queue and the open adapters may change.

        open_adapters: returns the open adapters; None: any.
        """
        key: Key | None = None
        while True:
            names = open_adapters()
            seq = self.after(key) if names is None else self._after_of(key, names)
            if seq is None:
                return
            key = _key(seq)
            yield seq

    def _after_of(self, key: Key | None, names: Collection[str | None]) -> SequenceView | None:
        """Returns the first sequence after a key that needs one of some adapters; key=None: the first."""
        queues = self._by_adapter
        found = [queues[name].after(key) for name in names if name in queues]
        return min((seq for seq in found if seq is not None), key=_key, default=None)


def _key(seq: SequenceView) -> Key:
    return seq.rank, seq.request_id
