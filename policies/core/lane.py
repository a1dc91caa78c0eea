"""The lane: a simplified engine for the simulator, with the same decisions as `EngineCore`, but faster.

    enter -> waiting --seat--> prefilling --complete--> decodes --advance, end-->

It handles the common case. No request has shared contents, so there are no prefix cache hits, and KV blocks
need only be counted; sequences have no slots, and the queue is a deque. The batching policy is called as
usual, with a view and a builder that have only the members which it has declared to use
(policies/core/lane_step.py). A lane never preempts: before blocks could run out, and for everything else that
a lane does not support, an `EngineCore` takes over its state and continues (`give_to`).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence as SequenceOf
from heapq import heappop, heappush
from typing import Final

from policies.batching import fills_in_order, max_unasked_of
from policies.caching.pool import BlockPool
from policies.caching.prefix_pool import PrefixPool
from policies.core.async_engine import AsyncEngineCore
from policies.core.engine import EngineCore
from policies.core.limits import StopAfter
from policies.core.plan import Cause, Chunk
from policies.core.request import Request
from policies.core.sequence import DECODING, ENDED, ENDING, PREFILLING, WAITING, Sequence
from policies.scheduling import overrides

_SLOT: Final = Cause.slot
_MEMORY: Final = Cause.memory
_HOOKS = ("before_step", "chunk_rank", "queue", "on_commit", "on_end")


def suits(core: EngineCore) -> bool:
    """Returns whether a lane can replace this engine, until an event that a lane does not support."""
    return type(core) in (EngineCore, AsyncEngineCore) and is_simple(core)


def is_simple(core: EngineCore) -> bool:
    """Returns whether an engine has only components that a lane supports, apart from its own class."""
    pool = core.block_pool
    return (
        type(pool) in (BlockPool, PrefixPool)
        and not pool.presume_cached
        and not pool.num_state_blocks
        and core.residents is None
        and core.predictor is None
        and fills_in_order(core.batching)
        and not any(overrides(core.scheduling, hook) for hook in _HOOKS)
    )


def is_common(request: Request) -> bool:
    """Returns whether a lane supports a request: one without shared contents, branches and adapter."""
    _, segments, num_pinned = request.prompt
    if segments or num_pinned:
        return False
    return request.answer_id is None and request.branching is None and request.adapter is None


class Lane:
    """The sequences of an engine, and the counts of its KV blocks.

    decodes: the decode set of the engine. num_kept: free blocks that still have cached contents; they are
    used (and evicted) after the other free blocks.
    """

    __slots__ = (
        "_bounds_of",
        "_keeps",
        "_max_decodes",
        "_max_num_seqs",
        "_num_admissions",
        "_num_watermark_blocks",
        "_rank",
        "block_size",
        "decodes",
        "ending",
        "ends_late",
        "num_blocks",
        "num_discarded",
        "num_evicted",
        "num_free",
        "num_kept",
        "num_running",
        "num_surplus",
        "prefilling",
        "sequences",
        "waiting",
    )

    def __init__(self, core: EngineCore) -> None:
        pool = core.block_pool
        self.decodes = core.decodes
        self.sequences: dict[int, Sequence] = {}
        """All sequences by request id, in the order in which they were added."""
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.num_running = 0
        self.ends_late = isinstance(core, AsyncEngineCore)
        self.ending: list[Sequence] = []
        """Complete sequences that hold their slots until the next commit; see `AsyncEngineCore`."""
        self.num_discarded = 0
        self.num_surplus = 0
        """Number of these that decode, for a token that is discarded."""
        self.num_free = pool.num_free
        self.num_kept = 0
        self.num_evicted = 0
        self.num_blocks = pool.num_blocks
        self.block_size = pool.block_size
        self._keeps = isinstance(pool, PrefixPool)
        self._num_watermark_blocks = pool.num_watermark_blocks
        self._num_admissions = 0
        self._max_num_seqs = core.max_num_seqs
        self._max_decodes = max_unasked_of(core.batching)
        self._bounds_of = core.limits.of
        self._rank = core.rank

    # Changes of sequences.

    def sequence_of(self, request: Request, stop_after: StopAfter) -> Sequence:
        """Returns the sequence of a common request, as `EngineCore.sequence_of` does."""
        end_known, end_reason, max_known = self._bounds_of(request, stop_after)
        return Sequence(request, self.decodes, end_known, end_reason, max_known)

    def enter(self, seq: Sequence) -> None:
        """Adds a sequence to the queue by its rank."""
        seq.rank = rank = self._rank(seq)
        self.sequences[seq.request_id] = seq
        waiting = self.waiting
        if waiting and rank <= waiting[-1].rank:
            insort(waiting, seq, key=_place)
        else:
            waiting.append(seq)

    def complete(self, seq: Sequence) -> bool:
        """Moves a sequence with a complete prefill to the decodes.

        Returns whether it ends with its first token.
        """
        self.prefilling.remove(seq)
        seq.stored_known += 1
        if seq.stored_known == seq._end_known:
            return True
        decodes, num_computed = self.decodes, seq.stored_computed
        clock = decodes.clock
        seq.origin = origin = num_computed - clock
        seq.state = DECODING
        seq.join_number = number = decodes.num_joins = decodes.num_joins + 1
        decodes.size += 1
        decodes.num_context_tokens += num_computed
        decodes.blocks_due_by_phase[-origin % self.block_size] += 1
        heappush(decodes.ends, (seq._end_known - 1 - origin, seq.request_id, number, seq))
        return False

    def advance(self, num_iterations: int) -> list[Sequence]:
        """Advances all decoding sequences by num_iterations tokens. Returns those that end."""
        decodes, block_size = self.decodes, self.block_size
        clock, due = decodes.clock, decodes.blocks_due_by_phase
        if num_iterations > 1:  # the blocks of the first iteration are already taken
            begin = (clock + 1) % block_size
            end = begin + num_iterations - 1
            if end <= block_size:
                num_blocks = sum(due[begin:end])
            else:
                num_blocks = decodes.blocks_due_after(1, num_iterations - 1)
            self.num_free = num_free = self.num_free - num_blocks
            if num_free < self.num_kept:
                self.num_evicted += self.num_kept - num_free
                self.num_kept = num_free
        decodes.clock = clock = clock + num_iterations
        decodes.num_context_tokens += num_iterations * decodes.size
        ends = decodes.ends
        ended: list[Sequence] = []
        while ends and ends[0][0] <= clock:
            seq = heappop(ends)[3]
            ended.append(seq)
            origin = seq.origin
            seq.stored_computed = num_computed = origin + clock
            seq.stored_known = num_computed + 1
            decodes.size -= 1
            decodes.num_context_tokens -= num_computed
            due[-origin % block_size] -= 1
        return ended

    def end(self, ended: list[Sequence]) -> None:
        """Removes sequences that have ended, and sorts the list `ended` by admission."""
        if len(ended) > 1:
            ended.sort(key=_admission)
        if self.ends_late:
            self._keep_ending(ended)
            return
        for seq in ended:
            self._free(seq, seq.stored_computed)
            seq.finish_reason = seq._end_reason
        self.num_running -= len(ended)

    def _free(self, seq: Sequence, num_held: int) -> None:
        """Frees the blocks of a complete sequence: those of num_held computed or planned tokens."""
        block_size = self.block_size
        self.num_free += -(-num_held // block_size)
        if self._keeps:
            self.num_kept += seq.stored_computed // block_size
        seq.state = ENDED
        del self.sequences[seq.request_id]

    def _keep_ending(self, ended: list[Sequence]) -> None:
        """Keeps complete sequences until the next commit; those below their limits decode one more token."""
        decodes = self.decodes
        self.ending = ended
        for seq in ended:
            num_computed = seq.stored_computed
            seq.finish_reason = seq._end_reason
            if seq.stored_known >= seq.max_num_tokens:
                seq.state = ENDING
                seq.num_unread = int(num_computed > seq.num_prompt_tokens)
                continue
            if seq.state is PREFILLING:
                seq.origin = num_computed - decodes.clock
                seq.state = DECODING
                seq.join_number = decodes.num_joins = decodes.num_joins + 1
            seq.stored_computed = seq.num_prompt_tokens  # as when it began to decode
            seq._end_known += 1
            decodes.size += 1
            decodes.num_context_tokens += num_computed
            decodes.blocks_due_by_phase[-seq.origin % self.block_size] += 1
            self.num_surplus += 1

    def free_ending(self) -> None:
        """Frees the complete sequences; those that decode have the block of one more token."""
        decodes = self.decodes
        for seq in self.ending:
            num_planned = 0
            if seq.state is DECODING:
                seq.stored_computed = num_computed = seq.origin + decodes.clock
                seq.stored_known = num_computed + 1
                decodes.size -= 1
                decodes.num_context_tokens -= num_computed
                decodes.blocks_due_by_phase[-seq.origin % self.block_size] -= 1
                num_planned = 1
            self._free(seq, seq.stored_computed + num_planned)
        self.num_running -= len(self.ending)
        self.num_discarded += self.num_surplus
        self.ending, self.num_surplus = [], 0

    @property
    def num_tokens_held_by_ending(self) -> int:
        """Tokens with KV of the complete sequences that do not decode."""
        return sum(seq.stored_computed for seq in self.ending if seq.state is ENDING)

    def take(self, num_blocks: int) -> None:
        """Takes free blocks, those without cached contents first."""
        self.num_free = num_free = self.num_free - num_blocks
        if num_free < self.num_kept:
            self.num_evicted += self.num_kept - num_free
            self.num_kept = num_free

    def seat(self, seq: Sequence, num_tokens: int) -> Cause | None:
        """Admits the first waiting sequence, and takes the blocks of its first num_tokens tokens.

        Returns the cause if it cannot be admitted, else None. Raises ValueError if `seq` is not the first.
        """
        if self.num_running >= self._max_num_seqs:
            return _SLOT
        block_size, num_free = self.block_size, self.num_free
        room = num_free - self._num_watermark_blocks if self.num_running else num_free
        if -(-seq.stored_known // block_size) > room:
            return _MEMORY
        if self.waiting.popleft() is not seq:
            raise ValueError(
                f"fills_in_order: the policy admits {seq!r} before sequences of smaller rank; "
                "do not declare fills_in_order, or admit in the order of `waiting`"
            )
        seq.admission = self._num_admissions = self._num_admissions + 1
        seq.state = PREFILLING
        self.num_running += 1
        self.prefilling.append(seq)
        self.num_free = num_free = num_free - -(-num_tokens // block_size)
        if num_free < self.num_kept:
            self.num_evicted += self.num_kept - num_free
            self.num_kept = num_free
        return None

    def begin_decodes(self) -> int:
        """Takes the blocks of an iteration in which all sequences decode.

        Returns the number of such iterations; 0 if the batching policy must be called, and then takes none.
        """
        decodes, block_size = self.decodes, self.block_size
        size, clock = decodes.size, decodes.clock
        num_free = self.num_free - decodes.blocks_due_by_phase[clock % block_size]
        if num_free < 0 or size > self._max_decodes:
            return 0
        self.num_free = num_free
        if num_free < self.num_kept:
            self.num_evicted += self.num_kept - num_free
            self.num_kept = num_free
        if self.ending:
            return 1
        horizon = decodes.ends[0][0] - clock
        if size * (horizon // block_size + 1) > num_free:
            return self.horizon()
        return horizon

    def horizon(self) -> int:
        """Returns the number of iterations in which all sequences decode, with the one just prepared."""
        decodes = self.decodes
        repeats = range(decodes.ends[0][0] - decodes.clock)
        return bisect_right(repeats, self.num_free, key=lambda num: decodes.blocks_due_after(1, num))

    def is_safe(self) -> bool:
        """Returns whether the free blocks suffice for the running sequences' next step in any case."""
        decodes, block_size = self.decodes, self.block_size
        num_needed = decodes.blocks_due_by_phase[decodes.clock % block_size]
        for seq in self.prefilling:
            num_needed += -(-seq.stored_known // block_size) + -seq.stored_computed // block_size
        return num_needed <= self.num_free and decodes.size <= self._max_decodes

    # The change to a complete engine.

    def give_to(self, core: EngineCore, num_iterations: int, chunks: SequenceOf[Chunk]) -> None:
        """Moves all sequences to an empty engine.

        num_iterations: number of iterations that have run. chunks: prompt chunks of the running step.
        """
        planned = {chunk.seq: chunk.num_tokens for chunk in chunks}
        running = [seq for seq in self.sequences.values() if seq.state is not WAITING]
        running.sort(key=_admission)
        core.take_over(self.sequences, running, self._num_admissions, num_iterations)
        core.running_set.take_over_ending(self.ending)
        core.num_discarded += self.num_discarded
        pool = core.block_pool
        pool.num_free = self.num_free
        if isinstance(pool, PrefixPool):
            pool.take_over(running, planned, self.num_kept, self.num_evicted)


def _admission(seq: Sequence) -> int:
    return seq.admission


def _place(seq: Sequence) -> tuple[tuple[float, ...], int]:
    return seq.rank, seq.request_id
