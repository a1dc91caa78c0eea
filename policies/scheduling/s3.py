"""S3: packs the batch by predicted lengths (Jin et al., NeurIPS 2023).

A classifier puts each request into a bucket of output lengths (`prediction=buckets`). Every request is
allotted memory for its prompt and the upper bound of its bucket, and the batch is packed like a bin: the
largest waiting sequence that fits into the unallotted memory is admitted first, then the next (decreasing
first fit). If an output exceeds its expected length, the length is doubled. The cache decides the
consequence. A cache that reserves memory (caching=contiguous) preempts the sequence if its region cannot
grow, as in the paper; a paged cache continues, and the larger allotment counts when the next sequences are
packed. Assumes mostly correct predictions: then no sequence is preempted although memory is full. Small
requests may starve while large ones keep arriving: only the `window` oldest are packed, which limits the work
but not the waiting time. Memory pressure: the last arrival is preempted. Horizon: while a request waits,
until an output exceeds its expected length; one iteration after an admission.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from fieldlimits import PositiveInt
from policies.core.plan import FOREVER
from policies.core.sequence import Sequence, SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.core.waiting_queue import WaitingQueue
from policies.scheduling import Scheduling
from policies.scheduling.shortest_job import expected_output_tokens


@dataclass(slots=True)
class _Memory:
    """The state of KV memory at the last step, in blocks."""

    num_blocks: int = 0
    num_unallotted: int = 0
    block_size: int = 1
    step: StepBuilder | None = None

    def blocks_for(self, num_tokens: int) -> int:
        """Computes the number of blocks for num_tokens tokens, at most all blocks."""
        return min(-(-num_tokens // self.block_size), self.num_blocks)

    def tokens_in(self, num_blocks: int) -> float:
        """Computes the maximum number of tokens in num_blocks blocks; infinite if these are all blocks."""
        return inf if num_blocks >= self.num_blocks else num_blocks * self.block_size


def _allotted(seq: SequenceView, num_expected: int) -> int:
    """Computes the tokens for which memory is allotted, with num_expected expected output tokens."""
    return min(seq.num_prompt_tokens + num_expected, seq.max_num_tokens)


_Need = tuple[int, tuple[float, ...], int, SequenceView]  # minus the allotted tokens, rank, id
_Entry = tuple[tuple[float, ...], int, _Need]  # rank, id: the oldest first


class PackingQueue(WaitingQueue):
    """A queue that yields the sequences that fit together, of the oldest `window`, largest first.

    The allotment of a sequence does not change while it waits.
    """

    def __init__(self, memory: _Memory, window: int) -> None:
        super().__init__()
        self._memory = memory
        self._window = window
        self._oldest: list[_Entry] = []
        self._largest: list[_Need] = []  # window by size; replaced, not changed: an iterator may use it

    def __len__(self) -> int:
        return len(self._oldest)

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, Sequence) and self._place(seq) is not None

    def push(self, seq: SequenceView) -> None:
        """Queues a sequence."""
        rank, request_id = seq.rank, seq.request_id
        num_tokens = _allotted(seq, expected_output_tokens(seq))
        entry = (rank, request_id, (-num_tokens, rank, request_id, seq))
        place = bisect_left(self._oldest, entry)
        self._oldest.insert(place, entry)
        if place < self._window:
            self._move_window([entry], self._oldest[self._window : self._window + 1])

    def remove(self, seq: SequenceView) -> None:
        """Removes a sequence. Raises KeyError if it is not here."""
        place = self._place(seq)
        if place is None:
            raise KeyError(seq.request_id)
        entry = self._oldest.pop(place)
        if place < self._window:
            self._move_window(self._oldest[self._window - 1 : self._window], [entry])
        step = self._memory.step
        if step is not None and step.is_open:  # an admission changes the window
            step.hold(1)

    def __iter__(self) -> Iterator[SequenceView]:
        memory = self._memory
        largest, room, place = self._largest, memory.num_unallotted, 0
        while True:  # find the next sequence that fits
            place = bisect_left(largest, (-memory.tokens_in(room),), place)
            if place == len(largest):
                return
            negated, _, _, seq = largest[place]
            place += 1
            yield seq
            if seq not in self:
                room -= memory.blocks_for(-negated)

    def _move_window(self, entering: list[_Entry], leaving: list[_Entry]) -> None:
        largest = self._largest.copy()
        for _, _, need in entering:
            insort(largest, need)
        for _, _, need in leaving:
            del largest[bisect_left(largest, need)]
        self._largest = largest

    def _place(self, seq: SequenceView) -> int | None:
        place = bisect_left(self._oldest, (seq.rank, seq.request_id))
        if place < len(self._oldest) and self._oldest[place][1] == seq.request_id:
            return place
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class S3(Scheduling):
    """The largest sequence that fits is admitted first; the last arrival is preempted first."""

    needs_predictor: ClassVar[bool] = True

    window: PositiveInt = 256
    """Number of the oldest waiting sequences that are considered."""

    _memory: _Memory = field(init=False, default_factory=_Memory, repr=False, compare=False)

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key for the window and for preemptions: (arrival,). The queue does the packing."""
        return (seq.request.arrival_s,)

    def queue(self) -> WaitingQueue:
        """Returns a queue that packs the waiting sequences."""
        return PackingQueue(self._memory, self.window)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Computes the memory not allotted to running sequences."""
        memory, running = self._memory, view.running
        memory.step = step
        if not view.num_waiting:
            return
        memory.num_blocks, memory.block_size = view.num_blocks, view.block_size
        num_unallotted, num_iterations = view.num_blocks, FOREVER
        for seq in running:
            num_expected = expected_output_tokens(seq)
            num_unallotted -= memory.blocks_for(_allotted(seq, num_expected))
            num_iterations = min(num_iterations, num_expected - seq.num_output_tokens)
        memory.num_unallotted = num_unallotted
        step.hold(num_iterations)
