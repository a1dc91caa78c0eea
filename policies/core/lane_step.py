"""The view and the step builder of a lane, for batching policies that declare `fills_in_order`.

They have the members of `StepView` and `StepBuilder` that `policies.batching.FillsInOrder` allows. The lane
has checked (`Lane.is_safe`) that there are blocks for all running sequences, so no sequence is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from operator import index
from typing import Final

from policies.core.lane import Lane
from policies.core.plan import FOREVER, Cause, Chunk
from policies.core.sequence import Sequence

_BUDGET: Final = Cause.budget
_NEW_CHUNK: Final[Callable[..., Chunk]] = partial(tuple.__new__, Chunk)  # without a call of Python code


class LaneView:
    """The part of `policies.core.view.StepView` that a policy with `fills_in_order` reads."""

    __slots__ = ("_lane", "prefilling")

    mixes_prefills = False
    """Only the last sequence that was admitted can be in prefill."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.prefilling = lane.prefilling

    @property
    def waiting(self) -> Iterator[Sequence]:
        """Sequences in the queue, smallest rank first; they may be admitted while iterating."""
        waiting = self._lane.waiting
        while waiting:
            first = waiting[0]
            yield first
            if waiting and waiting[0] is first:  # not admitted, but the caller continues
                yield from list(islice(waiting, 1, None))
                return


class LaneStep:
    """The methods of `policies.core.step.StepBuilder` that a policy with `fills_in_order` calls."""

    __slots__ = ("_lane", "admitted", "chunks", "promise", "refusal", "tokens_left")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.begin()

    def begin(self) -> None:
        """Opens an empty step."""
        self.tokens_left = FOREVER
        self.chunks: list[Chunk] = []
        self.admitted: list[Sequence] = []
        self.refusal: Cause | None = None
        """The cause for which the first waiting sequence was not admitted."""
        self.promise = 1

    def budget(self, max_num_tokens: int) -> None:
        """Limits this step to max_num_tokens tokens."""
        self.tokens_left = index(max_num_tokens)

    def decode_all(self) -> bool:
        """Decodes every decoding sequence."""
        lane = self._lane
        decodes = lane.decodes
        if decodes.size:
            self.tokens_left -= decodes.size
            lane.take(decodes.blocks_due_by_phase[decodes.clock % lane.block_size])
        return True

    def prefill(self, seq: Sequence, max_num_tokens: int) -> bool:
        """Computes up to max_num_tokens more tokens of a sequence in prefill."""
        num_computed = seq.stored_computed
        num_tokens = min(index(max_num_tokens), seq.stored_known - num_computed, self.tokens_left)
        if num_tokens < 1:
            return False
        num_then, block_size = num_computed + num_tokens, self._lane.block_size
        self._lane.take(-(-num_then // block_size) + -num_computed // block_size)
        self.chunks.append(_NEW_CHUNK((seq, num_computed, num_tokens, num_then == seq.stored_known)))
        self.tokens_left -= num_tokens
        return True

    def admit(self, seq: Sequence, max_num_tokens: int, *, may_cut: bool = True) -> bool:
        """Admits the first waiting sequence with up to max_num_tokens tokens of prefill."""
        num_known, tokens_left = seq.stored_known, self.tokens_left
        num_wanted = num_known if num_known < max_num_tokens else index(max_num_tokens)
        num_tokens = num_wanted if num_wanted <= tokens_left else tokens_left
        if num_tokens < 1 or (num_tokens < num_wanted and not may_cut):
            refusal: Cause | None = _BUDGET
        else:
            refusal = self._lane.seat(seq, num_tokens)
        if refusal is not None:
            if self.refusal is None:
                self.refusal = refusal
            return False
        self.admitted.append(seq)
        self.chunks.append(_NEW_CHUNK((seq, 0, num_tokens, num_tokens == num_known)))
        self.tokens_left = tokens_left - num_tokens
        return True

    def repeat(self) -> None:
        """Promises that the policy would decide the same step again."""
        self.promise = FOREVER
