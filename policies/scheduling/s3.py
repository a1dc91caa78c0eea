"""S3: pack the batch by predicted lengths (Jin et al., NeurIPS 2023).

A classifier puts each request into a bucket of output lengths (`prediction=buckets`). Every request is
allotted memory for its prompt and its bucket's upper bound, and the batch is filled as a bin is packed: of
those that wait, the largest need that fits in what is not allotted yet goes first, then the next (decreasing
first fit). An answer that outgrows its allotment has it doubled.
What the memory does about the allotment is up to the cache. One that reserves it preempts whoever outgrows
it, as in the paper; a paged one grows on, and the doubled allotment counts when the next are packed.
Assumes predictions that are mostly right: then nobody is preempted although memory is full. Small requests
may starve while large ones keep coming: only the `window` oldest are packed, which bounds the work, not the
wait.
Memory pressure: the last come goes. Horizon: what is allotted changes when an answer outgrows it, so until
then, while somebody waits; one iteration after an admission.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from policies.core.plan import FOREVER
from policies.core.sequence import Sequence
from policies.core.sequence_view import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.core.waiting import WaitingQueue
from policies.scheduling import Scheduling
from policies.scheduling.expectation import expected_output_tokens


@dataclass(slots=True)
class _Memory:
    """The KV memory as of the last look, in blocks."""

    num_blocks: int = 0
    num_unallotted: int = 0
    block_size: int = 1
    step: StepBuilder | None = None

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks for so many tokens, never more than there are."""
        return min(-(-num_tokens // self.block_size), self.num_blocks)

    def tokens_in(self, num_blocks: int) -> float:
        """The most tokens for which so many blocks are enough; infinite if all blocks are meant."""
        return inf if num_blocks >= self.num_blocks else num_blocks * self.block_size


def _allotted(seq: SequenceView, num_expected: int) -> int:
    """Tokens that memory is allotted for, if so many output tokens are expected."""
    return min(seq.num_prompt_tokens + num_expected, seq.max_num_tokens)


_Need = tuple[int, tuple[float, ...], int, SequenceView]  # tokens, negative: the largest need first; rank, id
_Entry = tuple[tuple[float, ...], int, _Need]  # rank, id: the oldest first


class PackingQueue(WaitingQueue):
    """Offers the oldest `window` sequences that fit together, the largest need first.

    What a sequence is allotted stands while it waits.
    """

    def __init__(self, memory: _Memory, window: int) -> None:
        super().__init__()
        self._memory = memory
        self._window = window
        self._oldest: list[_Entry] = []
        self._largest: list[_Need] = []  # of the window; replaced, not changed: somebody may go through it

    def __len__(self) -> int:
        return len(self._oldest)

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, Sequence) and self._place(seq) is not None

    def push(self, seq: SequenceView) -> None:
        """Queue a sequence."""
        rank, request_id = seq.rank, seq.request_id
        num_tokens = _allotted(seq, expected_output_tokens(seq))
        entry = (rank, request_id, (-num_tokens, rank, request_id, seq))
        place = bisect_left(self._oldest, entry)
        self._oldest.insert(place, entry)
        if place < self._window:
            self._move_window([entry], self._oldest[self._window : self._window + 1])

    def remove(self, seq: SequenceView) -> None:
        """Take a sequence out. KeyError if it is not here."""
        place = self._place(seq)
        if place is None:
            raise KeyError(seq.request_id)
        entry = self._oldest.pop(place)
        if place < self._window:
            self._move_window(self._oldest[self._window - 1 : self._window], [entry])
        step = self._memory.step
        if step is not None and step.is_open:  # an admission: the window moves on
            step.hold(1)

    def __iter__(self) -> Iterator[SequenceView]:
        memory = self._memory
        largest, room, place = self._largest, memory.num_unallotted, 0
        while True:  # on to the next whose need is in the room
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
    """The largest predicted need that fits is admitted first; the last come is preempted first."""

    needs_predictor: ClassVar[bool] = True

    window: int = 256
    """How many of the waiting are considered, the oldest."""

    _memory: _Memory = field(init=False, default_factory=_Memory, repr=False, compare=False)

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        if self.window < 1:
            raise ValueError(f"window={self.window}: must be >= 1")

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """(arrival,): who is in the window, and who is preempted; the packing is the queue's."""
        return (seq.request.arrival_s,)

    def queue(self) -> WaitingQueue:
        """A queue that packs."""
        return PackingQueue(self._memory, self.window)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Count what is allotted to the running."""
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
