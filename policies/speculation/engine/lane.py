"""The lane of an engine that speculates: the simplified engine of `policies.core.lane`, with drafts.

While every sequence decodes in every step with the same number of draft tokens, what is accepted determines
all its passes when it begins to decode. The lane adds them to sums by iteration then, and an iteration only
reads the sums:

    iteration         clock   clock + 1   clock + 2
    sequence A          9        12          13  ends
    sequence B                  (joins)       5         8  ...
    num_computed        9        12          18         8         computed tokens before it, summed

An iteration therefore takes the same time for one sequence as for a hundred. For what it does not support,
such as another number of draft tokens, a `SpeculativeCore` takes over its state and continues (`give_to`).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from policies.core.decode_set import DecodeSet
from policies.core.engine import EngineCore
from policies.core.lane import Lane, is_common, is_simple
from policies.core.limits import StopAfter
from policies.core.plan import Cause, Chunk
from policies.core.request import Request
from policies.core.sequence import DECODING, ENDED, ENDING, PREFILLING, Sequence
from policies.speculation.engine.async_core import AsyncSpeculativeCore
from policies.speculation.engine.core import Speculating, SpeculativeCore
from policies.speculation.engine.drafts import Shapes
from policies.speculation.engine.lane_passes import Passes, tokens_of_passes
from policies.speculation.engine.lane_sums import LaneSums
from policies.speculation.fixed import Fixed


def suits(core: EngineCore) -> bool:
    """Returns whether a lane can replace this engine, until an event that a lane does not support."""
    if type(core) not in (SpeculativeCore, AsyncSpeculativeCore) or not is_simple(core):
        return False
    assert isinstance(core, Speculating)
    speculation = core.speculation
    return type(speculation.draft_length) is Fixed and not speculation.proposer.rules.prefill_lookahead


class DraftLane(Lane):
    """The sequences of an engine that speculates, and sums over them by iteration.

    num_levels, num_rows: levels and number of the draft tokens of every sequence.
    """

    __slots__ = (
        "_is_planned",
        "_lookahead",
        "_max_tokens",
        "_most_known",
        "_num_held",
        "_tokens_at",
        "max_inputs",
        "num_input_slots",
        "num_levels",
        "num_rows",
        "passes",
        "sums",
    )

    def __init__(self, core: EngineCore) -> None:
        Lane.__init__(self, core)
        assert isinstance(core, Speculating)
        proposer, policy = core.speculation.proposer, core.speculation.draft_length
        assert isinstance(policy, Fixed)
        shapes, rules = Shapes(proposer), proposer.rules
        wanted = shapes.max_depth if policy.num_tokens is None else policy.num_tokens
        self.num_levels = min(wanted, shapes.max_depth)
        self.num_rows = int(shapes.rows[self.num_levels])
        self.num_input_slots = rules.num_input_slots
        self._lookahead = shapes.num_rows if rules.keeps_lookahead else 0
        self.decodes = DecodeSet(core.max_num_seqs, self.block_size, {})
        self.max_inputs = getattr(core.batching, "max_num_batched_tokens", 0)
        self._max_tokens = min(
            self._max_decodes, max(self.max_inputs, self._max_decodes) - self.num_input_slots
        )
        # No pass of a sequence with so many tokens reaches the limits of the model or the cache.
        self._most_known = core.drafting.max_slots - 2 * (1 + self.num_rows) - self._lookahead - 2
        self.sums = LaneSums()
        self.passes: dict[int, Passes] = {}
        """Passes of the sequences that decode or are complete, by request id."""
        self._tokens_at: dict[int, bytes] = {}  # by request id, for requests without a first token
        self._is_planned = False  # whether the blocks of the next iteration have been taken
        self._num_held = 0  # KV blocks of the decoding sequences

    # What a lane can serve.

    def num_positions(self, request: Request, stop_after: StopAfter) -> int | None:
        """Returns the output tokens of a request that a lane supports; None: it does not support it.

        Raises RejectedError if no engine can serve it.
        """
        num_prompt = request.prompt.num_tokens
        if not is_common(request) or num_prompt < 2:  # one token gets rows of padding
            return None
        end_known = self._bounds_of(request, stop_after)[0]
        return end_known - num_prompt if end_known <= self._most_known else None

    def expect(self, request_id: int, accepted: NDArray[np.uint8]) -> None:
        """Sets the accepted draft tokens of a request, by the output position at which a draft begins."""
        num_tokens = np.minimum(accepted, self.num_levels)
        num_tokens += 1
        self._tokens_at[request_id] = num_tokens.tobytes()

    # Changes of sequences.

    def complete(self, seq: Sequence) -> bool:
        """Moves a sequence with a complete prefill to the decodes, as `Lane.complete` does."""
        self.prefilling.remove(seq)
        seq.stored_known += 1
        num_computed, sums = seq.stored_computed, self.sums
        num_tokens = seq._end_known - num_computed
        tokens, surplus = tokens_of_passes(num_tokens, self._tokens_at.pop(seq.request_id))
        num_passes = len(tokens)
        at = np.empty(num_passes + 1, np.int64)
        at[0] = num_computed
        at[1:] = np.frombuffer(tokens, np.uint8)
        np.add.accumulate(at, out=at)
        own = self.passes[seq.request_id] = Passes(sums, seq, at, tokens, surplus)
        if not num_passes:
            own.num_blocks = self._blocks_of_prompt(num_computed)
            return True
        at[num_passes] -= surplus
        decodes, clock = self.decodes, sums.clock
        seq.origin, seq.clock_source, seq.state = 0, own, DECODING
        decodes.size += 1
        decodes.num_context_tokens += num_computed
        self._num_held += self._blocks_of_prompt(num_computed)
        sums.reach(clock + num_passes + 1)
        begin, end = clock - sums.first, clock - sums.first + num_passes
        before = at[:-1]
        sums.computed[begin:end] += before
        num_more = self._lookahead + self.num_rows + self.block_size
        if self.ends_late:  # a pass counts the draft tokens of the one before it as computed
            sums.blocks[begin] += (num_computed + num_more) // self.block_size
            begin += 1
            before, num_more = at[:-2], num_more + 1 + self.num_rows
        num_blocks = before + num_more
        num_blocks //= self.block_size
        sums.blocks[begin:end] += num_blocks
        heappush(decodes.ends, (clock + num_passes, seq.request_id, 0, seq))
        return False

    def _blocks_of_prompt(self, num_computed: int) -> int:
        """Returns the KV blocks of a sequence in prefill with so many computed tokens."""
        return -(-(num_computed + self._lookahead) // self.block_size) if num_computed else 0

    def _blocks_of_pass(self, own: Passes, index: int) -> int:
        """Returns the KV blocks of a sequence in one of its passes, or in the one after its end."""
        base = int(own.num_computed[index])
        if self.ends_late and index:
            base = int(own.num_computed[index - 1]) + 1 + self.num_rows
        return -(-(base + 1 + self.num_rows + self._lookahead) // self.block_size)

    def advance(self, num_iterations: int) -> list[Sequence]:
        """Advances all decoding sequences by num_iterations passes. Returns those that end."""
        decodes, sums = self.decodes, self.sums
        if num_iterations > 1:  # the blocks of the first iteration are already taken
            self._hold(int(sums.blocks[sums.clock - sums.first + num_iterations - 1]))
        self._is_planned = False
        sums.advance(num_iterations)
        clock, ends = sums.clock, decodes.ends
        ended: list[Sequence] = []
        while ends and ends[0][0] <= clock:
            seq = heappop(ends)[3]
            ended.append(seq)
            own = self.passes[seq.request_id]
            num_passes = len(own.tokens)
            seq.stored_computed = num_computed = int(own.num_computed[num_passes])
            seq.stored_known = num_computed + 1
            own.num_blocks = self._blocks_of_pass(own, num_passes - 1)
            self._num_held -= own.num_blocks
            decodes.size -= 1
        decodes.num_context_tokens = int(sums.computed[clock - sums.first])
        return ended

    @property
    def num_blocks_of_others(self) -> int:
        """KV blocks in use by sequences that do not decode."""
        return self.num_blocks - self.num_free - self._num_held

    def _hold(self, num_blocks: int) -> None:
        """Takes KV blocks so that the decoding sequences have num_blocks."""
        self.take(num_blocks - self._num_held)
        self._num_held = num_blocks

    def end(self, ended: list[Sequence]) -> None:
        """Removes sequences that have ended, and sorts the list `ended` by admission."""
        if len(ended) > 1:
            ended.sort(key=lambda seq: seq.admission)
        if self.ends_late:
            self._keep_ending(ended)
            return
        for seq in ended:
            own = self.passes[seq.request_id]
            num_unread = max(own.num_last - 1, 0)
            self._drop(seq, own.num_blocks, seq.stored_computed - num_unread)
            seq.finish_reason = seq._end_reason
        self.num_running -= len(ended)

    def _drop(self, seq: Sequence, num_blocks: int, num_readable: int) -> None:
        """Frees the blocks of a complete sequence; a prefix cache keeps its first num_readable tokens."""
        self.num_free += num_blocks
        if self._keeps:
            self.num_kept += num_readable // self.block_size
        seq.state = ENDED
        del self.sequences[seq.request_id]

    def passes_of(self, seq: Sequence) -> Passes:
        """Returns the passes of a complete sequence, once."""
        return self.passes.pop(seq.request_id) if seq.state is ENDED else self.passes[seq.request_id]

    def _keep_ending(self, ended: list[Sequence]) -> None:
        """Keeps complete sequences until the next commit, as `Lane._keep_ending` does."""
        decodes, sums = self.decodes, self.sums
        at = sums.clock - sums.first
        self.ending = ended
        for seq in ended:
            own = self.passes[seq.request_id]
            seq.finish_reason = seq._end_reason
            if seq.stored_known - max(own.num_last - 1, 0) >= seq.max_num_tokens:
                seq.state = ENDING
                seq.num_unread = own.num_last
                continue
            seq.origin, seq.clock_source, seq.state = 0, own, DECODING
            seq._end_known += 1
            decodes.size += 1
            decodes.num_context_tokens += seq.stored_computed
            self._num_held += own.num_blocks
            own.num_blocks = self._blocks_of_pass(own, len(own.tokens))
            sums.computed[at] += seq.stored_computed
            sums.blocks[at] += own.num_blocks
            self.num_surplus += 1

    def free_ending(self) -> None:
        """Frees the complete sequences; those that decode have the blocks of one more pass."""
        decodes = self.decodes
        for seq in self.ending:
            own = self.passes.pop(seq.request_id)
            if seq.state is DECODING:
                decodes.size -= 1
                self._num_held -= own.num_blocks
            self._drop(seq, own.num_blocks, seq.stored_computed)
        self.num_running -= len(self.ending)
        self.num_discarded += self.num_surplus
        self.ending, self.num_surplus = [], 0

    def seat(self, seq: Sequence, num_tokens: int) -> Cause | None:
        """Admits the first waiting sequence, as `Lane.seat` does; it also takes the slots of drafting."""
        num_slots = num_tokens + self._lookahead
        if num_slots > seq.stored_known:
            num_free = self.num_free
            room = num_free - self._num_watermark_blocks if self.num_running else num_free
            if self.num_running < self._max_num_seqs and -(-num_slots // self.block_size) > room:
                return Cause.memory
        return Lane.seat(self, seq, num_slots)

    def grow(self, num_computed: int, num_then: int) -> None:
        """Takes the blocks of a chunk."""
        self.take(self._blocks_of_prompt(num_then) - self._blocks_of_prompt(num_computed))

    def take_due(self) -> None:
        """Takes the blocks of an iteration in which all sequences decode."""
        self._hold(int(self.sums.blocks[self.sums.clock - self.sums.first]))
        self._is_planned = True

    def begin_decodes(self) -> int:
        """Takes the blocks of an iteration in which all sequences decode, as `Lane.begin_decodes` does."""
        if not self.is_safe():
            return 0
        self.take_due()
        return 1 if self.ending else self.horizon()

    def horizon(self) -> int:
        """Returns the number of iterations in which all sequences decode, with the one just prepared."""
        sums = self.sums
        horizon = self.decodes.ends[0][0] - sums.clock
        begin = sums.clock - sums.first
        num_held = sums.blocks[begin : begin + horizon]  # never decreases
        most = self._num_held + self.num_free
        if num_held[-1] <= most:
            return horizon
        return int(num_held.searchsorted(most, side="right"))

    def is_safe(self) -> bool:
        """Returns whether blocks and budget suffice for the running sequences' next step in any case."""
        size = self.decodes.size
        if size * (1 + self.num_rows) + self.num_input_slots * (size - 1) > self._max_tokens:
            return False
        num_needed = 0
        if size:
            num_needed = int(self.sums.blocks[self.sums.clock - self.sums.first]) - self._num_held
        for seq in self.prefilling:
            num_needed += self._blocks_of_prompt(seq.stored_known)
            num_needed -= self._blocks_of_prompt(seq.stored_computed)
        return num_needed <= self.num_free

    # The change to a complete engine.

    def give_to(self, core: EngineCore, num_iterations: int, chunks: SequenceOf[Chunk]) -> None:
        """Moves all sequences to an empty engine, as `Lane.give_to` does."""
        Lane.give_to(self, core, num_iterations, chunks)
        assert isinstance(core, Speculating)
        decodes, pool = core.drafting, core.block_pool
        planned = {chunk.seq: chunk.num_tokens for chunk in chunks}
        for seq in core.running.values():
            if seq.state is DECODING:
                self._give_member(core, seq)
                continue
            num_then = seq.stored_computed + planned.get(seq, 0)
            num_blocks = self._blocks_of_prompt(num_then)
            if seq.state is not PREFILLING:
                num_blocks = self.passes[seq.request_id].num_blocks
            seq.num_extra_blocks = num_blocks - pool.blocks_for(num_then)
            pool.num_extra_blocks += seq.num_extra_blocks
        decodes.drafts_S[decodes.slots] = self.num_rows

    def _give_member(self, core: Speculating, seq: Sequence) -> None:
        """Lets a decoding sequence join the draft set of an engine, with the counts of its passes."""
        decodes, own, slot = core.drafting, self.passes[seq.request_id], seq.slot
        num_run, num_prompt = own.num_run, seq.num_prompt_tokens
        seq.stored_computed = own.clock
        decodes.join(seq)
        seq.stored_computed, seq.stored_known = num_prompt, num_prompt + 1
        if num_run:
            decodes.last_S[slot] = own.num_last
        decodes._told_S[slot] = num_prompt
        if self.ends_late and num_run:
            decodes.base_S[slot] = int(own.num_computed[num_run - 1]) + 1 + self.num_rows
        if self._is_planned:
            num_blocks = self._blocks_of_pass(own, num_run)
        elif num_run:
            num_blocks = self._blocks_of_pass(own, num_run - 1)
        else:
            num_blocks = self._blocks_of_prompt(num_prompt)
        decodes.blocks_S[slot] = num_blocks
