"""The step builder: the methods with which a batching policy builds a step.

The builder reserves blocks and slots immediately and checks every call against budget and memory, so a policy
cannot leak a block, exceed the budget or compute a token twice.

The engine opens the builder with `begin`, policies fill it, and `end` turns it into a plan. The module is
long because a policy's author reads all of it: the available calls, what each call reserves, and the contents
of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from math import inf
from operator import index
from typing import TYPE_CHECKING, NoReturn, TypeGuard

from policies.caching.block_tables import Branches
from policies.core.decode_set import cut_horizon
from policies.core.plan import FOREVER, NEW_CHUNK, Cause, Chunk, StepPlan
from policies.core.sequence import (
    ACTIVE_STATES,
    DECODING,
    ENDING,
    PAGED,
    PAUSED,
    PREFILLING,
    WAITING,
    Sequence,
    SequenceView,
)
from policies.core.state import EngineState

if TYPE_CHECKING:
    from policies.speculation.engine.step import DraftRows


class StepBuilder:
    """The methods that fill a step.

        budget                       limits the tokens of the step
        decode_all, decode, prefill  give tokens to running sequences
        admit                        gives a waiting sequence a slot, KV and tokens
        computes_prompts             whether the step computes chunks of prompts
        reserve_first_chunks admissions need room for their first chunk only
        preempt, pause, resume       stop a sequence, or let it continue
        evict_ahead, refresh         evict cached contents before they are needed, or delay their eviction
        rerank recomputes a sequence's rank with the scheduling policy repeat, hold, wait_until     define for
        how long the decision holds

    Methods return whether they succeeded; a refusal is normal and changes nothing. An invalid call raises
    ValueError, and so does every call after the end of the step.
    """

    FOR_POLICIES = (
        *("admit", "budget", "computes_prompts", "decode", "decode_all", "evict_ahead", "hold"),
        *("num_tokens", "pause", "preempt", "prefill", "refresh", "repeat", "rerank"),
        *("reserve_first_chunks", "resume", "tokens_left", "wait_until"),
    )
    """The names that a policy may use; all others are reserved for the engine."""

    def __init__(self, state: EngineState, drafts: DraftRows | None = None) -> None:
        self.is_open = False
        """Whether a step is being built."""
        self.max_batch_seqs: int | None = None
        """Maximum number of sequences in a step with admissions; None: only the slots limit them."""
        self.is_of_rank = False
        """Whether the step is filled for one rank of data-parallel attention after the other."""
        self._state = state
        self._pool = state.block_pool
        self._decodes = state.decodes
        self._drafts = drafts  # the part of a step that draft tokens use; None: each decode is one token
        self._clear()

    def _clear(self) -> None:
        """Empties the step."""
        self.num_tokens = 0
        """Tokens scheduled in this step."""
        self.tokens_left = FOREVER
        """Tokens that the budget still allows."""
        self._all_decode = False  # whether the whole decode set decodes
        self._decoded: dict[int, Sequence] = {}  # the decoding sequences by request id, unless _all_decode
        self._chunks: list[Chunk] = []
        self._admitted: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._completes = False  # a chunk completes a prefill, so the next step differs
        self._promise = 1
        self._hold = FOREVER
        self._until_s = self._pool.expires_s
        self._pool.awaits_answer = False
        self._waits = False
        self._wake_s = inf
        self._lacked_blocks = False  # whether a sequence was preempted for lack of blocks
        self._refusal: Cause | None = None  # reason of the first failed admission
        self._reserves_all = True  # whether an admission needs room for all known tokens
        self.has_read = False
        """Whether the previous step's tokens have been read because this step has none."""
        if self._drafts is not None:
            self._drafts.clear()

    # What policies call.

    def budget(self, max_num_tokens: int) -> None:
        """Limits this step to max_num_tokens tokens; without this call there is no limit."""
        self.tokens_left = index(max_num_tokens) - self.num_tokens
        if self._drafts is not None:
            self._drafts.limit(self.tokens_left + self.num_tokens)
            self._spend(0, 0)

    def repeat(self, num_iterations: int = FOREVER) -> None:
        """Promises that the policy would make the same decision for num_iterations iterations.

        The promise ends with an event (an arrival, an abort, a finished transfer, the end of a sequence or of
        a prefill, a full KV cache), for which the core checks. Without a promise a step holds for one
        iteration.
        """
        if not (isinstance(num_iterations, int) and num_iterations >= 1):
            raise ValueError(f"repeat({num_iterations}): must be a whole number of iterations >= 1")
        self._promise = num_iterations

    def hold(self, num_iterations: int = FOREVER, until_s: float = inf) -> None:
        """Limits a promise: the policies decide again after num_iterations iterations or at time until_s.

        The smallest of several limits applies. until_s: the first end of an iteration at or after that time.
        """
        if num_iterations < 1:
            raise ValueError(f"hold({num_iterations}): must be a whole number of iterations >= 1")
        self._hold = min(self._hold, num_iterations)
        self._until_s = min(self._until_s, until_s)

    def wait_until(self, time_s: float) -> None:
        """Lets the engine wait until time_s or the next event if this step computes nothing.

        Then the policies are called again; inf: at the next event only. Without this call, a step that
        computes nothing is an error while requests are unfinished.
        """
        self._waits = True
        self._wake_s = min(self._wake_s, time_s)

    def decode_all(self) -> bool:
        """Decodes every decoding sequence in the order of admission, as far as the budget allows.

        If blocks run out, the sequences of largest rank are preempted until the others fit, as by `decode`.
        Returns False if not all sequences decode because the budget is used up, or because a sequence of
        largest rank preempted itself; in that case the others decode if `StepView.serves_past_preempted`. A
        sequence with branches takes `width` tokens, all or none.
        """
        if not self.is_open:
            self._refuse_late()
        if self._drafts is not None:
            return self.decode_together() or self._decode_each()
        if self.is_of_rank:
            return self._decode_rank()
        decodes, pool = self._decodes, self._pool
        if decodes.at_limit and (not pool.slides or self._all_fit()):
            self._renew_all()
        num_decodes, branched = decodes.size, self._state.branched.members
        if not num_decodes and not branched:
            return True
        num_due = decodes.blocks_due()
        if num_due > pool.num_free:
            self._state.make_room(num_due)
        fits = num_decodes <= self.tokens_left and num_due <= pool.num_free
        if fits and not (self._decoded or self._all_decode or branched):
            if num_due:
                pool.take(num_due)
            self._all_decode = True
            self.num_tokens += num_decodes
            self.tokens_left -= num_decodes
            return True
        return self._decode_each()

    def decode_together(self) -> bool:
        """Decodes all sequences with all their draft tokens.

        Returns False, unchanged, without room for it.
        """
        if self._drafts is None or self.is_of_rank or self._decoded or self._all_decode:
            return False
        num_tokens = self._drafts.take_all(self.tokens_left)
        if num_tokens is None:
            return False
        self._all_decode = True
        self._spend(num_tokens, self._decodes.size)
        return True

    def _decode_each(self) -> bool:
        """Decodes one sequence after the other, as `decode_all` does."""
        for seq in [seq for seq in self._state.running.values() if seq.state is DECODING]:
            if seq.state is DECODING and not (self._has_decoded(seq) or self._decodes_or_left(seq)):
                return False
        return True

    def _decodes_or_left(self, seq: Sequence) -> bool:
        """Decodes a sequence; returns False if the sequences after it must not be served."""
        return self.decode(seq) or (self._state.release.serves_past_preempted and seq.state is not DECODING)

    def _decode_rank(self) -> bool:
        """Decodes every decoding sequence of one rank, as `decode_all` does."""
        decodes = self._decodes
        own = {id: seq for id, seq in self._state.running.items() if seq.state is DECODING}
        if self.num_tokens or len(own) > self.tokens_left or decodes.at_limit or self._state.branched.members:
            return self._decode_each()
        clock, block_size = decodes.clock, decodes.block_size
        num_due = 0
        for seq in own.values():
            if seq.growth is PAGED:
                num_due += not (seq.origin + clock - seq.num_dropped) % block_size
            else:
                num_due += decodes.needs_block(seq)
        num_due *= self._pool.num_tables
        if num_due and not self._state.make_room(num_due):
            return self._decode_each()
        self._pool.take(num_due)
        self._decoded.update(own)
        self._spend(len(own))
        return True

    def decode(self, seq: SequenceView) -> bool:
        """Schedules a decoding sequence's next token; False if it has no budget or this step preempted it.

        A sequence with branches gets one token per branch: seq.width tokens, all or none.
        If it needs a block and none is free, the sequences of largest rank are preempted until one is free.
        With drafts, the sequence gets no token and the result is True if its last step may fill the model's
        context.
        """
        if not self._may_decode(seq):
            return False
        if seq.branches is not None:
            return self._decode_branches(seq, seq.branches)
        if seq.request_id in self._decodes.at_limit and not self._renew(seq):
            return False
        if self._drafts is None:
            num_tokens, num_blocks = 1, self._pool.num_tables if self._decodes.needs_block(seq) else 0
        else:
            num_tokens, num_blocks = self._drafts.next_pass(seq, self.tokens_left)
            if not num_tokens:
                return True
        if not self._make_room(seq, num_blocks):
            return False
        self._pool.take(num_blocks)
        self._decoded[seq.request_id] = seq
        self._spend(num_tokens)
        if self._drafts is not None:
            self._drafts.add_pass(seq, num_tokens, num_blocks)
        return True

    def _all_fit(self) -> bool:
        """Returns whether the step has tokens and blocks for the next token of every decoding sequence."""
        return self._decodes.size <= self.tokens_left and self._decodes.blocks_due() <= self._pool.num_free

    def _may_decode(self, seq: SequenceView) -> TypeGuard[Sequence]:
        """Returns whether the step has budget for a decoding sequence, and has not preempted it.

        Raises ValueError if the sequence is not decoding, or already decodes in this step.
        """
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        if seq in self._preempted:
            return False
        if seq.state is not DECODING or self._has_decoded(seq):
            raise ValueError(f"{seq!r} cannot decode: not decoding, or decoded in this step already")
        return self.tokens_left >= 1

    def prefill(self, seq: SequenceView, max_num_tokens: int) -> bool:
        """Computes up to max_num_tokens more tokens of a sequence in prefill.

        The number is limited by the budget and the rest of the prompt. Returns False if no token is left to
        compute, or if this step preempted the sequence.
        """
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        if self._drafts is not None:
            max_num_tokens = self._drafts.cut(seq, seq.stored_computed, max_num_tokens, self.tokens_left)
            if max_num_tokens < 1 <= self.tokens_left:
                return True  # it waits for a budget that covers the rest of its prompt
        if seq in self._preempted:
            return False
        if seq.state is not PREFILLING or any(chunk.seq is seq for chunk in self._chunks):
            raise ValueError(
                f"{seq!r} cannot continue its prefill: not in prefill, or has a chunk in this step already"
            )
        num_tokens = min(index(max_num_tokens), seq.num_uncomputed, self.tokens_left)
        if num_tokens < 1:
            return False
        if self._pool.slides:
            self._pool.slide(seq, seq.stored_computed)
        if not self._make_room(seq, self._num_blocks_of_chunk(seq, num_tokens)):
            return False
        self._add_chunk(seq, num_tokens)
        if self._drafts is not None:
            self._drafts.has_prefilled = True
        return True

    def admit(self, seq: SequenceView, max_num_tokens: int, *, may_cut: bool = True) -> bool:
        """Admits a waiting sequence with up to max_num_tokens tokens of prefill, limited by the budget.

        may_cut: if False, the sequence is refused instead of being cut to the budget.
        If a part of its KV is in another tier or its adapter must be loaded, it gets slot and blocks and
        starts to run when the load is done. Returns False if there is no slot or no budget, if there is no
        room for all its known tokens (see `reserve_first_chunks`) or its adapter, or if this step has
        preempted a sequence.
        """
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        if seq.state is not WAITING:
            raise ValueError(f"{seq!r} cannot be admitted: it is not waiting")
        state = self._state
        num_cached = state.transfers.num_cached(seq) if seq.num_swapped else self._pool.num_cached(seq)
        num_rows = 0
        if self._drafts is not None:
            has_decodes = self._all_decode or bool(self._decoded)
            fit = self._drafts.fit(seq, num_cached, max_num_tokens, self.tokens_left, has_decodes)
            max_num_tokens, num_rows, must_cut = fit
            if max_num_tokens < 1:
                return self._refuse_unfit(self._drafts, num_cached)
            may_cut |= must_cut
        num_wanted = seq.stored_known - num_cached
        if max_num_tokens < num_wanted:
            num_wanted = index(max_num_tokens)
        num_tokens = num_wanted if num_wanted <= self.tokens_left else self.tokens_left
        if num_tokens < 1 or (num_tokens < num_wanted and not may_cut):
            return self._refuse(Cause.budget)
        if not state.free_slots or (seq.request.branching is not None and len(state.free_slots) < seq.width):
            return self._refuse(Cause.slot)
        if self.max_batch_seqs is not None and self._num_in_batch() + seq.width > self.max_batch_seqs:
            return self._refuse(Cause.slot)
        self._reserve(seq, num_cached + num_tokens, num_rows)
        refusal = state.refusal(seq, num_cached, bool(self._preempted))
        if refusal is not None:
            may_shrink = not self._reserves_all or (not may_cut and seq.stored_known > self.tokens_left)
            if refusal is Cause.memory and num_cached and (may_shrink or self._pool.slides):
                self._hold = 1  # after eviction its prefix needs no blocks, or the cause becomes the budget
            seq.num_unreserved_blocks = 0
            return self._refuse(refusal)
        state.start(seq, num_cached)
        seq.num_unreserved_blocks = 0
        if seq.request_id not in state.loading:
            self._admitted.append(seq)
            self._add_chunk(seq, num_tokens, num_rows)
        return True

    @property
    def computes_prompts(self) -> bool:
        """True if the step computes prompts; an admitted prompt's last token alone does not count."""
        admitted = self._admitted
        return any(c.seq not in admitted or c.num_cached + 1 < c.seq.stored_known for c in self._chunks)

    def reserve_first_chunks(self) -> None:
        """Admits later sequences of this step if there is room for their cached tokens and first chunk.

        Its further chunks may then preempt others. KV from another tier needs room for all known tokens.
        """
        self._reserves_all = False

    def evict_ahead(self, num_blocks: int) -> None:
        """Evicts cached contents until num_blocks empty blocks are free, if the cache can (`radix`)."""
        self._pool.evict_ahead(num_blocks)

    def refresh(self, seq: SequenceView) -> None:
        """Marks the cached tokens of a waiting sequence as used now.

        Does nothing if the scheduling policy looks it up in every step.
        """
        assert isinstance(seq, Sequence)
        if not self._state.looks_up:
            self._pool.touch(seq)

    def pause(self, seq: SequenceView) -> None:
        """Pauses a decoding sequence until it is resumed; it keeps slot and KV."""
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        if seq.state is not DECODING or self._has_decoded(seq):
            raise ValueError(f"{seq!r} cannot be paused: not decoding, or decoded in this step already")
        self._state.running_set.pause(seq)

    def resume(self, seq: SequenceView) -> None:
        """Lets a paused sequence decode again, in this step if the batching policy gives it a token."""
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        if seq.state is not PAUSED:
            raise ValueError(f"{seq!r} cannot be resumed: it is not paused")
        self._state.running_set.resume(seq)

    def rerank(self, seq: SequenceView) -> None:
        """Recomputes a sequence's rank with the scheduling policy, and moves it in the order."""
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        self._state.rerank(seq)

    def _num_in_batch(self) -> int:
        """Counts the running sequences outside other batches, including those admitted by this step."""
        state = self._state
        if self.is_of_rank:
            return sum(seq.state in (DECODING, PREFILLING) for seq in state.running.values())
        return self._decodes.size + len(state.prefilling) + len(state.branched.members)

    def _refuse(self, cause: Cause) -> bool:
        if self._refusal is None:
            self._refusal = cause
        return False

    def _refuse_unfit(self, drafts: DraftRows, num_cached: int) -> bool:
        """Refuses a prompt if no chunk of it fits with its rows; returns whether later prompts may fit."""
        if drafts.may_skip:
            return self._refuse(Cause.budget) or True
        if num_cached and drafts.cuts_prompts:
            self._hold = 1  # after a shorter hit it has more tokens to compute and no padding
        return self._refuse(Cause.budget)

    def _reserve(self, seq: Sequence, num_then: int, num_rows: int) -> None:
        """Sets the blocks of a waiting sequence that need not be free at its admission.

        num_then: its computed tokens after this step. num_rows: rows of padding after them.
        """
        pool, state = self._pool, self._state
        pool.num_first_tokens = num_then
        if not self._reserves_all and num_then < seq.stored_known and not (state.loads_kv or seq.num_swapped):
            seq.num_unreserved_blocks = pool.blocks_for(seq.stored_known) - pool.blocks_for(num_then)
        if self._drafts is not None:
            seq.num_unreserved_blocks -= self._drafts.num_blocks_behind(seq, num_then, num_rows)

    def _has_decoded(self, seq: SequenceView) -> bool:
        return (self._all_decode and seq.request.branching is None) or seq.request_id in self._decoded

    def _decode_branches(self, seq: Sequence, branches: Branches) -> bool:
        """Schedules the next token of each branch."""
        if branches.width > self.tokens_left:
            return False
        num_blocks = branches.blocks_to_append()
        if not self._make_room(seq, num_blocks):
            return False
        self._pool.take_extra(num_blocks)
        seq.num_extra_blocks += num_blocks
        self._decoded[seq.request_id] = seq
        self._spend(branches.width)
        return True

    def _num_blocks_of_chunk(self, seq: Sequence, num_tokens: int) -> int:
        """Counts the blocks that the next num_tokens tokens of a sequence in prefill need."""
        num_computed = seq.stored_computed
        if self._drafts is not None:
            return self._drafts.blocks_to_grow(seq, num_computed + num_tokens)
        return self._pool.blocks_to_grow(seq, num_computed, num_computed + num_tokens)

    def _add_chunk(self, seq: Sequence, num_tokens: int, num_rows: int = 0) -> None:
        """Adds a chunk. num_rows: rows of padding after it."""
        num_computed = seq.stored_computed
        num_then = num_computed + num_tokens
        if self._drafts is None:
            self._pool.grow(seq, num_computed, num_then)
        else:
            self._drafts.grow(seq, num_then, num_rows)
        completes = num_then == seq.stored_known
        if completes:
            self._completes = True
        self._chunks.append(NEW_CHUNK((seq, num_computed, num_tokens, completes)))
        self._spend(num_tokens + num_rows)

    def preempt(self, seq: SequenceView, swap: bool | None = None) -> None:
        """Moves a sequence back to the waiting queue; it loses its slot, its KV and its part of this step.

        Sequences are preempted as well if this step admitted them with a cache hit on blocks that the
        preempted sequence would have computed. Does nothing if this step has preempted the sequence already.
        swap: if there is room, its computed KV is moved to host memory and loaded when it is admitted again;
        otherwise it is recomputed. None: the scheduling policy's preemption_mode decides. A sequence that was
        admitted in this step has computed nothing and is always recomputed.
        """
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        if seq in self._preempted:
            return
        if seq.state not in ACTIVE_STATES and seq.state is not ENDING:
            raise ValueError(f"{seq!r} cannot be preempted: it must be prefilling, decoding or paused")
        if seq.state is PREFILLING or seq.request.answer_id is not None:
            for other in self._state.running_set.sharers(seq):
                self._take_back(other, swap=False)
        self._take_back(seq, self._state.swaps if swap is None else swap)

    def _make_room(self, seq: Sequence, num_blocks: int) -> bool:
        """Preempts by rank until num_blocks are free; False if `seq` itself was preempted or must wait.

        It waits while the KV of a sequence of larger rank is being loaded: if it were preempted instead, the
        two could preempt each other without end.
        """
        state = self._state
        while not state.make_room(num_blocks):
            victim = state.running_set.victim(state.running)
            if victim is seq and any(other.rank > seq.rank for other in state.loading.values()):
                return False
            num_before = len(self._preempted)
            self.preempt(victim)
            for lost in self._preempted[num_before:]:
                lost.displaced_by = seq.request_id
            self._lacked_blocks = True
            if victim is seq:
                return False
        return True

    def _take_back(self, seq: Sequence, swap: bool) -> None:
        """Preempts a sequence; no other sequence may depend on its part of this step."""
        num_planned = 0
        if seq.state is DECODING:
            if self._all_decode:
                self._decoded = {s.request_id: s for s in self._decodes}
                self._all_decode = False
                if self._drafts is not None:
                    self._drafts.list_rows()
            num_planned = seq.width if self._decoded.pop(seq.request_id, None) is not None else 0
        elif seq.state is PREFILLING:
            num_planned = sum(chunk.num_tokens for chunk in self._chunks if chunk.seq is seq)
            self._chunks = [chunk for chunk in self._chunks if chunk.seq is not seq]
        num_rows = 0 if self._drafts is None else self._drafts.take_back(seq, num_planned > 0)
        self._spend(-num_planned - num_rows, -int(num_planned > 0))
        if seq.request_id in self._state.ending:
            assert seq.finish_reason is not None
            self._state.finish(seq, seq.finish_reason, num_planned)
            self._preempted.append(seq)
            return
        if seq in self._admitted:
            self._admitted.remove(seq)
            swap = False  # this step may be the one that computes its cached KV
        self._state.stop(seq, num_planned, swap)
        seq.displaced_by = None
        self._preempted.append(seq)

    def _renew_all(self) -> None:
        """Updates the growth of every sequence at its KV limit; sequences without room are preempted."""
        at_limit = self._decodes.at_limit
        slides = self._pool.slides  # vLLM frees, and so evicts, in the order of admission
        for seq in sorted(at_limit.values(), key=lambda seq: seq.admission if slides else seq.request_id):
            if seq.request_id in at_limit:
                self._renew(seq)

    def _renew(self, seq: Sequence) -> bool:
        """Gets the further growth of a sequence at its KV limit from the pool.

        If it cannot grow, preempts it and returns False.
        """
        self._decodes.leave(seq, PREFILLING)
        self._pool.slide(seq, seq.stored_computed)
        growth = self._pool.growth(seq)
        self._decodes.join(seq, growth or seq.growth)
        if growth is None:
            self.preempt(seq)
            seq.displaced_by = seq.request_id
            self._lacked_blocks = True
            return False
        return True

    def _spend(self, num_tokens: int, num_requests: int = 1) -> None:
        """Subtracts tokens of requests from the budget."""
        self.num_tokens += num_tokens
        self.tokens_left -= num_tokens
        if self._drafts is not None:
            self.tokens_left = self._drafts.tokens_left(self.num_tokens, num_requests)

    def _refuse_late(self) -> NoReturn:
        raise ValueError("this step has ended: a builder may only be used in the fill() that received it")

    # What the engine calls.

    def begin(self) -> None:
        """Opens an empty step."""
        self._clear()
        self.is_open = True

    def begin_ranks(self) -> None:
        """Lets the step be filled rank by rank, each with `begin_rank` and `end_rank`."""
        self._promise = FOREVER

    def begin_rank(self) -> None:
        """Begins the part of one rank, with its own budget and promise."""
        self._others = self.num_tokens, self._preempted, self._promise, self._waits
        self.num_tokens, self._preempted, self._promise, self._waits = 0, [], 1, False
        self.tokens_left, self._reserves_all = FOREVER, True
        if self._drafts is not None:
            self._drafts.begin_rank()

    def end_rank(self) -> bool:
        """Ends the part of a rank: the plan holds as long as all parts do.

        Returns whether the rank has preempted sequences and computes no token.
        """
        num_tokens, preempted, promise, waits = self._others
        has_only_freed = bool(self._preempted) and not self.num_tokens
        if self._waits and not self.num_tokens:
            self._promise, self._until_s = FOREVER, min(self._until_s, self._wake_s)
        self.num_tokens += num_tokens
        self._preempted = preempted + self._preempted
        self._promise = min(self._promise, promise)
        self._waits |= waits
        return has_only_freed

    def end(self) -> StepPlan | None:
        """Closes the step and returns it as a plan; None if it computes no token.

        The horizon is cut to the first event that ends the policy's promise.
        """
        self.is_open = False
        self._pool.settle()
        if not self.num_tokens:
            return None
        state, decodes, pool = self._state, self._decodes, self._pool
        idle: SequenceOf[Sequence] = ()
        if self._all_decode or self._decoded:
            decoding: Iterable[Sequence] = decodes
            num_decodes, num_widening = decodes.size, decodes.num_widening
            num_context_tokens = num_widening + decodes.num_context_tokens
            if not self._all_decode:
                idle = [seq for seq in decodes if seq.request_id not in self._decoded]
                num_decodes -= len(idle)
                widening = sum(seq.growth.widens for seq in idle)
                num_widening -= widening
                num_context_tokens -= sum(seq.num_held for seq in idle) + widening
        else:
            decoding, num_decodes, num_widening, num_context_tokens = (), 0, 0, 0
        horizon = self._promise if self._promise < self._hold else self._hold
        if self._completes or idle or self._preempted or (self._chunks and pool.replans_chunks):
            horizon = 1
        if pool.awaits_answer:
            horizon = 1
        if self._admitted and state.chunk_rank is not None:  # they change the order of prefills
            horizon = 1
        plan = StepPlan(
            pool.num_iterations,
            num_decodes,
            num_context_tokens,
            num_widening,
            decoding,
            horizon,
            self._until_s,
            self._chunks,
            self._admitted,
            self.preempted if self._preempted else (),
            idle,
            self.waits_for() if len(state.sequences) > len(state.running) else None,
        )
        if self._drafts is not None:
            self._drafts.complete(plan, None if self._all_decode else self._decoded)
        state.complete(plan, self._decoded)
        if plan.horizon > 1 and self._drafts is None:
            plan.horizon = cut_horizon(plan, decodes, pool)
        return plan

    def num_readable(self, seq: Sequence, in_flight: StepPlan | None) -> int:
        """Counts the leading tokens of a running sequence that are known and computed, this step included.

        in_flight: the plan of this step, if it is complete.
        """
        num_computed = seq.num_computed
        is_decoding = seq.state is DECODING
        if self._drafts is not None:
            return self._drafts.num_readable(seq, in_flight, self.is_open and self._has_decoded(seq))
        if in_flight is not None:
            has_decoded = is_decoding and in_flight.num_decodes > 0 and seq not in in_flight.idle
        else:
            has_decoded = self.is_open and is_decoding and self._has_decoded(seq)
        state = self._state
        if not state.running_set.reads_late:
            return num_computed + has_decoded
        if has_decoded:
            return num_computed + 1 - state.num_unread(seq)
        return num_computed - (state.cache_lags(seq) if is_decoding else seq.num_unread)

    @property
    def has_preempted(self) -> bool:
        """True if the step has preempted sequences, those with a complete output included."""
        return bool(self._preempted)

    @property
    def preempted(self) -> list[Sequence]:
        """Sequences that the step has preempted and that will continue, in order."""
        preempted = self._preempted
        return [seq for seq in preempted if seq.finish_reason is None] if preempted else preempted

    @property
    def has_freed(self) -> bool:
        """True if the step has freed memory without computing anything, so another attempt may succeed."""
        return self.has_read or bool(self._preempted)

    @property
    def wake_s(self) -> float | None:
        """Time at which the policies ask to be called again if no token is computed; None: no such time."""
        return self._wake_s if self._waits else None

    def waits_for(self) -> Cause | None:
        """Returns the reason why the first waiting sequence waits; None: no sequence is waiting."""
        if not self._state.num_waiting:
            return None
        if self._lacked_blocks:
            return Cause.memory
        if self._refusal is not None:
            return self._refusal
        return self._state.cause_if_untried()
