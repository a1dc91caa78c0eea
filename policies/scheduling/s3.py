"""S3: pack the batch by predicted lengths (Jin et al., NeurIPS 2023).

A classifier puts each request into a bucket of output lengths (`prediction=buckets`). Every request is
allotted memory for its prompt and its bucket's upper bound, and the batch is filled as a bin is packed: of
those that wait, the largest need that fits in what is not allotted yet goes first, then the next (decreasing
first fit). An answer that outgrows its allotment has it doubled.
What the memory does about the allotment is up to the cache. One that reserves it preempts whoever outgrows
it, as in the paper; a paged one grows on, and the doubled allotment counts when the next are packed.
Assumes predictions that are mostly right: then nobody is preempted although memory is full. Small requests
starve while large ones keep coming; only the `window` oldest are packed, which bounds the work, not the wait.
Memory pressure: the last come goes. Horizon: what is allotted changes when an answer outgrows it, so until
then, while somebody waits; one iteration after an admission.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from policies.scheduling import Scheduling
from policies.scheduling.expectation import expected_output_tokens, remaining_output_tokens
from policies.sequence import Sequence
from policies.step import StepBuilder, StepView
from policies.waiting import WaitingQueue


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


def _allotted(seq: Sequence) -> int:
    """Tokens that memory is allotted for."""
    return min(seq.num_prompt_tokens + expected_output_tokens(seq), seq.max_num_tokens)


class PackingQueue(WaitingQueue):
    """Offers the oldest `window` sequences that fit together, the largest need first."""

    def __init__(self, memory: _Memory, window: int) -> None:
        super().__init__()
        self._memory = memory
        self._window = window
        self._oldest: list[tuple[tuple[float, ...], int, int, Sequence]] = []  # rank, id, tokens
        self._largest: list[tuple[int, tuple[float, ...], int, Sequence]] | None = None  # of the window

    def __len__(self) -> int:
        return len(self._oldest)

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, Sequence) and self._place(seq) is not None

    def push(self, seq: Sequence) -> None:
        """Queue a sequence."""
        insort(self._oldest, (seq.rank, seq.request_id, _allotted(seq), seq))
        self._largest = None

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out. KeyError if it is not here."""
        place = self._place(seq)
        if place is None:
            raise KeyError(seq.request_id)
        del self._oldest[place]
        self._largest = None
        step = self._memory.step
        if step is not None and step.is_open:  # an admission: the window moves on
            step.hold(1)

    def __iter__(self) -> Iterator[Sequence]:
        memory = self._memory
        if self._largest is None:  # what a sequence is allotted stands while it waits
            window = self._oldest[: self._window]
            self._largest = sorted((-num_tokens, rank, n, seq) for rank, n, num_tokens, seq in window)
        room = memory.num_unallotted
        for negated, _, _, seq in self._largest:
            need = memory.blocks_for(-negated)
            if need <= room:
                yield seq
                if seq not in self:
                    room -= need

    def _place(self, seq: Sequence) -> int | None:
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

    def rank(self, seq: Sequence) -> tuple[float, ...]:
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
        memory.num_unallotted = view.num_blocks - sum(memory.blocks_for(_allotted(seq)) for seq in running)
        if running:
            step.hold(min(map(remaining_output_tokens, running)))
