"""How a batching policy acts: a read-only view of the engine, and a builder with a small vocabulary.

The builder reserves blocks and slots as it goes and checks every wish against budget and memory, so a policy
cannot leak a block, exceed the budget or compute a token twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from operator import index
from typing import TYPE_CHECKING

from policies.plan import FOREVER, Chunk, StepPlan
from policies.sequence import Sequence, SequenceState

if TYPE_CHECKING:
    from policies.engine import EngineCore


class StepView:
    """What a policy may look at. Nothing here tells how long an answer will be."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @property
    def decoding(self) -> SequenceOf[Sequence]:
        """Sequences with one uncomputed token each, in the order of their admission."""
        return [seq for seq in self._core.running.values() if seq._state is SequenceState.decoding]

    @property
    def prefilling(self) -> SequenceOf[Sequence]:
        """Sequences whose prefill has begun, in the order of their admission."""
        return list(self._core.prefilling.values()) if self._core.prefilling else ()

    @property
    def waiting(self) -> Iterable[Sequence]:
        """Sequences without KV, smallest rank first; may be admitted while iterating."""
        return iter(self._core.waiting) if self._core.waiting else ()

    @property
    def num_decoding(self) -> int:
        """How many decode."""
        return self._core.decodes.size

    @property
    def num_running(self) -> int:
        """How many hold KV: decoding or in prefill, those admitted in this step included."""
        return len(self._core.running)

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        return len(self._core.waiting)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks nobody owns, after what this step reserved so far."""
        return self._core.pool.num_free

    @property
    def max_num_seqs(self) -> int:
        """Slots: how many sequences may hold KV at once."""
        return self._core.max_num_seqs


class StepBuilder:
    """The verbs of a step: budget, decode, decode_all, prefill, admit, preempt, repeat.

    Every verb says by its return value whether it was done; refusing is normal and changes nothing. What
    makes no sense raises ValueError, and so does every verb once the step is over.
    """

    __slots__ = (
        "_admitted",
        "_all_decode",
        "_chunks",
        "_completes",
        "_core",
        "_decoded",
        "_horizon",
        "_is_over",
        "_preempted",
        "num_tokens",
        "tokens_left",
    )

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.num_tokens = 0
        """Tokens given out in this step."""
        self.tokens_left = FOREVER
        """Tokens that the budget still allows."""
        self._all_decode = False  # everybody in the decode set, without naming them
        self._decoded: dict[int, Sequence] = {}  # or these, by request id
        self._chunks: list[Chunk] = []
        self._admitted: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._completes = False  # a prefill: what follows is another step
        self._horizon = 1
        self._is_over = False

    def budget(self, max_num_tokens: int) -> None:
        """Allow at most max_num_tokens tokens in this step; without it there is no limit."""
        self.tokens_left = index(max_num_tokens) - self.num_tokens

    def repeat(self, num_iterations: int = FOREVER) -> None:
        """Promise: for num_iterations iterations this very step would be decided again.

        Only events from outside (an arrival, an abort, the end of a sequence or of a prefill, a full KV
        cache) may change it; the core watches for those. Without a promise a step holds for one iteration.
        """
        if not (isinstance(num_iterations, int) and num_iterations >= 1):
            raise ValueError(f"repeat({num_iterations}): must be a whole number of iterations >= 1")
        self._horizon = num_iterations

    def decode_all(self) -> None:
        """Decode every decoding sequence in the order of admission, as far as the budget goes.

        If blocks run out, sequences of largest rank are preempted until the others fit, as by `decode`.
        """
        self._check_open()
        core = self._core
        num_decodes = core.decodes.size
        if not num_decodes:
            return
        num_due = core.decodes.blocks_due()
        fits = num_decodes <= self.tokens_left and num_due <= core.pool.num_free
        if fits and not self._decoded and not self._all_decode:
            core.pool.take(num_due)
            self._all_decode = True
            self.num_tokens += num_decodes
            self.tokens_left -= num_decodes
            return
        for seq in core.view.decoding:
            if seq._state is SequenceState.decoding and not self._has_decoded(seq) and not self.decode(seq):
                break

    def decode(self, seq: Sequence) -> bool:
        """Give a decoding sequence its next token; False if the budget is gone or this step preempted it.

        If it needs a block and none is free, the sequence of largest rank is preempted, again and again.
        """
        self._check_open()
        if seq in self._preempted:
            return False
        if seq._state is not SequenceState.decoding or self._has_decoded(seq):
            raise ValueError(f"{seq!r} cannot decode: not decoding, or decoded in this step already")
        num_blocks = int(seq.num_computed % self._core.pool.block_size == 0)
        if self.tokens_left < 1 or not self._make_room(seq, num_blocks):
            return False
        self._core.pool.take(num_blocks)
        self._decoded[seq.request_id] = seq
        self._spend(1)
        return True

    def prefill(self, seq: Sequence, max_num_tokens: int) -> bool:
        """Compute up to max_num_tokens more tokens of a sequence whose prefill has begun.

        Cut to the budget and to what is left of the prompt. False if that leaves nothing, or if the sequence
        was preempted in this step.
        """
        self._check_open()
        if seq in self._preempted:
            return False
        if seq._state is not SequenceState.prefilling or any(chunk.seq is seq for chunk in self._chunks):
            raise ValueError(
                f"{seq!r} cannot continue its prefill: not begun, or served in this step already"
            )
        num_tokens = min(index(max_num_tokens), seq.num_uncomputed, self.tokens_left)
        pool = self._core.pool
        num_blocks = pool.blocks_for(seq.num_computed + num_tokens) - pool.blocks_for(seq.num_computed)
        if num_tokens < 1 or not self._make_room(seq, num_blocks):
            return False
        self._add_chunk(seq, num_tokens, num_blocks)
        return True

    def admit(self, seq: Sequence, max_num_tokens: int) -> bool:
        """Give a waiting sequence a slot and up to max_num_tokens tokens of prefill, cut to the budget.

        False if there is no slot or no budget, if its whole prompt could not get blocks now, or if this step
        has preempted somebody.
        """
        self._check_open()
        if seq._state is not SequenceState.waiting:
            raise ValueError(f"{seq!r} cannot be admitted: it does not wait")
        core = self._core
        num_cached = core.pool.num_cached(seq)
        num_tokens = min(index(max_num_tokens), seq._known - num_cached, self.tokens_left)
        if num_tokens < 1 or self._preempted or not core.free_slots or not core.pool.can_admit(seq._known):
            return False
        core._start(seq, num_cached)
        self._admitted.append(seq)
        self._add_chunk(seq, num_tokens, core.pool.blocks_for(num_cached + num_tokens))
        return True

    def preempt(self, seq: Sequence) -> None:
        """Take slot, KV and its part of this step from a sequence; it waits, and is recomputed later."""
        self._check_open()
        core = self._core
        if seq._state is SequenceState.decoding:
            if self._all_decode:
                self._decoded = {s.request_id: s for s in core.decodes}
                self._all_decode = False
            num_tokens = int(self._decoded.pop(seq.request_id, None) is not None)
        elif seq._state is SequenceState.prefilling:
            mine = [chunk for chunk in self._chunks if chunk.seq is seq]
            num_tokens = sum(chunk.num_tokens for chunk in mine)
            self._chunks = [chunk for chunk in self._chunks if chunk.seq is not seq]
        else:
            raise ValueError(f"{seq!r} holds no KV: it cannot be preempted")
        self._spend(-num_tokens)
        if seq in self._admitted:
            self._admitted.remove(seq)
        core._stop(seq, core.pool.blocks_for(seq.num_computed + num_tokens))
        self._preempted.append(seq)

    def _check_open(self) -> None:
        if self._is_over:
            raise ValueError("this step is over: a builder is good for the fill() that it was given to")

    def _spend(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.tokens_left -= num_tokens

    def _has_decoded(self, seq: Sequence) -> bool:
        return self._all_decode or seq.request_id in self._decoded

    def _add_chunk(self, seq: Sequence, num_tokens: int, num_blocks: int) -> None:
        self._core.pool.take(num_blocks)
        completes = seq._computed + num_tokens == seq._known
        self._completes = self._completes or completes
        self._chunks.append(Chunk(seq, seq._computed, num_tokens, completes))
        self._spend(num_tokens)

    def _make_room(self, seq: Sequence, num_blocks: int) -> bool:
        """Preempt by rank until num_blocks are free; False if `seq` itself had to go."""
        core = self._core
        while core.pool.num_free < num_blocks:
            victim = max(core.running.values(), key=lambda s: (s._rank, s.request_id))
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def _plan(self, step_index: int) -> StepPlan:
        """The step as data, its horizon cut to the first thing that would break the policy's promise."""
        decodes = self._core.decodes
        decoding: Iterable[Sequence] = decodes
        num_decodes = decodes.size
        num_context_tokens = num_decodes + decodes.num_context_tokens
        idle: list[Sequence] = []
        if not self._all_decode:
            if self._decoded:
                idle = [seq for seq in decodes if seq.request_id not in self._decoded]
                num_decodes -= len(idle)
                num_context_tokens -= sum(seq.num_known for seq in idle)
            else:
                decoding, num_decodes, num_context_tokens = (), 0, 0
        horizon = 1 if self._completes or idle or self._preempted else self._horizon
        plan = StepPlan(
            step_index,
            num_decodes,
            num_context_tokens,
            self._chunks,
            self._admitted,
            self._preempted,
            horizon,
            decoding,
            idle,
        )
        if horizon > 1:
            plan.horizon = self._cut_horizon(plan)
        return plan

    def _cut_horizon(self, plan: StepPlan) -> int:
        """Iterations until a sequence or a prefill ends or blocks run out: 1 to what was promised."""
        core = self._core
        horizon = plan.horizon
        if plan.num_decodes:
            horizon = min(horizon, core.decodes.iterations_to_first_end())
        for chunk in plan.chunks:  # the chunk that completes a prefill will be a step of its own
            horizon = min(horizon, (chunk.seq.num_uncomputed - 1) // chunk.num_tokens)
        num_free = core.pool.num_free
        blocks_each = horizon // core.pool.block_size + 1
        if plan.chunks or plan.num_decodes * blocks_each > num_free:  # else there are blocks in any case
            repeats = range(horizon)
            horizon = bisect_right(repeats, num_free, key=lambda num: core.blocks_of_repeats(plan, num))
        return horizon
