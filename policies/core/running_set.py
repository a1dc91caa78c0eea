"""The sequences that hold a slot and KV, and the set to which each of them belongs.

    admit -> loading -- finish_loading --> decoding <- pause, resume -> paused
      |                   |                 ^   +-- depart, arrive -> computing
      +-> prefilling <----+                 |   +-- begin_kv_transfer -> leaving
            |                               |   +-- end_late -> ending, or one more token
            +-- begin_decoding, fork -------+       from any set: leave, then release

Decoding sequences advance together (policies/core/decode_set.py), those with branches separately
(policies/core/branch_set.py). The engine decides which sequences wait, and which ones enter and leave.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from heapq import heappop, heappush

from policies.caching.pool import BlockPool
from policies.core.branch_set import BranchSet, num_prompt_block_tokens
from policies.core.decode_set import DecodeSet
from policies.core.plan import StepPlan
from policies.core.sequence import (
    AT_LIMIT,
    COMPUTING,
    DECODING,
    ENDING,
    LEAVING,
    LOADING,
    PAGED,
    PAUSED,
    PREFILLING,
    Sequence,
    SequenceState,
)


class RunningSet:
    """The slots of an engine, and the sets of the sequences that hold one.

    decodes: the decoding ones, with draft tokens; None: each of them gets one token.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, decodes: DecodeSet | None = None) -> None:
        self.running: dict[int, Sequence] = {}  # by request id, in the order of admission
        self.prefilling: dict[int, Sequence] = {}  # sequences with prompt tokens left, in the same order
        self.paused: dict[int, Sequence] = {}  # sequences that a policy has paused
        self.loading: dict[int, Sequence] = {}  # sequences that wait for KV or an adapter to be loaded
        self.leaving: dict[int, Sequence] = {}  # sequences with KV that another engine is copying
        self.ending: dict[int, Sequence] = {}  # complete ones, until the next commit
        self.computing: dict[int, Sequence] = {}  # sequences that await a token from a pipeline
        self._beside_decodes = (self.prefilling, self.paused, self.leaving, self.ending, self.computing)
        if decodes is None:
            decodes = DecodeSet(max_num_seqs, pool.block_size, self.running, pool.num_tables)
        self.decodes = decodes
        self.free_slots = list(range(max_num_seqs))  # a heap: the lowest free slot is used next
        self.branched = BranchSet(pool, self.free_slots)
        self.reads_late = False
        """Whether the tokens of a step are read only when the next step is planned, as with
        `Ends.one_step_late`.
        """
        self.preempts_newest = False
        """Whether the sequence that was admitted last is preempted first; see `Scheduling`."""
        self.by_rank: SequenceOf[dict[int, Sequence]] = ()
        """Running sequences of each rank of data-parallel attention, if there are several; see `Ranks`."""
        self._max_num_seqs = max_num_seqs
        self._pool = pool
        self._asks_for_growth = type(pool).growth is not BlockPool.growth
        self._num_admissions = 0

    @property
    def num_tokens_held(self) -> int:
        """Number of tokens with stored KV."""
        num_tokens = self.decodes.num_context_tokens
        for others in self._beside_decodes:
            if others:
                for seq in others.values():
                    if seq.state is not DECODING:  # sequences that end late are members of the decode set
                        num_tokens += seq.stored_computed - seq.num_dropped
        if self.branched.members:
            num_tokens += self.branched.num_tokens_held
        return num_tokens

    def num_surplus(self, plan: StepPlan) -> int:
        """Counts the complete sequences that decode in a plan, for a token that is discarded."""
        if not plan.num_decodes:
            return 0
        num_surplus = 0
        for seq in self.ending.values():
            if seq.state is DECODING and seq not in plan.idle:
                num_surplus += 1
        return num_surplus

    def num_pooled(self, seq: Sequence) -> int:
        """Counts the tokens for which the pool counts blocks as the sequence's own."""
        num_branched = num_prompt_block_tokens(seq)
        if num_branched is not None:
            return num_branched
        return self.decodes.num_pooled(seq) if seq.state is DECODING else seq.num_held

    def victim(self, running: dict[int, Sequence]) -> Sequence:
        """Returns the sequence of largest rank, or with `preempts_newest` the one admitted last.

        Sequences in KV transfers or in a pipeline are excluded. running: the running sequences, of all ranks
        or of one rank of data-parallel attention.
        """
        candidates: Collection[Sequence] = running.values()
        if self.loading or self.leaving or self.computing:
            candidates = [seq for seq in candidates if seq.state not in (LOADING, LEAVING, COMPUTING)]
        if self.preempts_newest:
            return max(candidates, key=lambda seq: seq.admission)
        return max(candidates, key=lambda seq: (seq.rank, seq.request_id))

    def sharers(self, seq: Sequence) -> list[Sequence]:
        """Returns the sequences with a cache hit on blocks that the current step computes for `seq`.

        The last admitted comes first.
        """
        sharers = [self.running[request_id] for request_id in self._pool.sharers(seq)]
        return sorted(sharers, key=lambda other: other.admission, reverse=True)

    def admit(self, seq: Sequence, num_cached: int, num_loaded: int, lacks_adapter: bool) -> None:
        """Admits a waiting sequence: it gets a slot and KV for num_cached tokens.

        num_loaded: tokens after these with KV that is being loaded. lacks_adapter: whether its adapter is
        being loaded.
        """
        request_id = seq.request_id
        seq.slot = heappop(self.free_slots)
        self.running[request_id] = seq
        if self.by_rank:
            self.by_rank[seq.dp_rank][request_id] = seq
        seq.admission = self._num_admissions = self._num_admissions + 1
        self._pool.admit(seq, num_cached)
        if self._pool.num_state_blocks:
            self._pool.take_extra(self._pool.num_state_blocks)
        if seq.request.branching is not None:
            self.branched.start(seq)
        seq.stored_computed = seq.num_found = num_cached
        seq.num_dropped = 0
        if not (num_loaded or lacks_adapter):
            seq.state = PREFILLING
            self.prefilling[request_id] = seq
            return
        seq.state = LOADING
        self.loading[request_id] = seq
        if num_loaded:
            seq.stored_computed = seq.num_found = num_cached + num_loaded
            seq.num_loading = num_loaded
            self._pool.grow(seq, num_cached, seq.stored_computed)
            self._pool.settle()  # the blocks are named now

    def finish_loading(self, seq: Sequence) -> None:
        """Lets a sequence continue after its KV and its adapter were loaded."""
        del self.loading[seq.request_id]
        if seq.branches is not None and seq.branches.is_swapped:
            self.branched.join(seq, seq.branches)
        elif seq.branches is None and seq.num_uncomputed == 1 and seq.stored_known > seq.num_prompt_tokens:
            self._join(seq)
        else:
            seq.state = PREFILLING
            self.prefilling[seq.request_id] = seq

    def begin_decoding(self, seq: Sequence) -> bool:
        """Adds the first output token of a sequence after its prefill; returns whether it ends with it."""
        seq.stored_known += 1
        if seq.stored_known == seq._end_known:
            return True
        del self.prefilling[seq.request_id]
        self._join(seq)
        return False

    def fork(self, seq: Sequence) -> None:
        """Starts decoding a sequence with branches after its prefill."""
        del self.prefilling[seq.request_id]
        self.branched.fork(seq)

    def pause(self, seq: Sequence) -> None:
        """Pauses a decoding sequence; it keeps slot and KV."""
        self._end_decoding(seq, PAUSED)
        self.paused[seq.request_id] = seq

    def resume(self, seq: Sequence) -> None:
        """Lets a paused sequence decode again."""
        del self.paused[seq.request_id]
        if seq.branches is None:
            self.decodes.join(seq, seq.growth)
        else:
            self.branched.resume(seq, seq.branches)

    def depart(self, seq: Sequence) -> None:
        """Moves a sequence to the pipeline: its newest known token counts as computed from now on."""
        if seq.state is DECODING:
            self.decodes.leave(seq, COMPUTING)
            seq.stored_computed += 1
        else:
            del self.prefilling[seq.request_id]
            seq.state = COMPUTING
        self.computing[seq.request_id] = seq

    def arrive(self, seq: Sequence) -> bool:
        """Adds the token of a departed decode; returns whether the sequence ends with it."""
        del self.computing[seq.request_id]
        seq.stored_known += 1
        if seq.stored_known == seq._end_known:
            seq.state = ENDING
            return True
        self.decodes.join(seq, seq.growth)
        return False

    def prefill_again(self, seq: Sequence) -> None:
        """Moves a departed sequence with a computed prompt back to prefill, as before its last chunk."""
        del self.computing[seq.request_id]
        seq.state = PREFILLING
        self.prefilling[seq.request_id] = seq

    def begin_kv_transfer(self, seq: Sequence) -> None:
        """Stops a sequence that decodes or is paused until its KV has been copied by another engine."""
        if seq.state is PAUSED:
            del self.paused[seq.request_id]
        else:
            self._end_decoding(seq, LEAVING)
        seq.state = LEAVING
        self.leaving[seq.request_id] = seq

    def cancel_kv_transfer(self, seq: Sequence) -> None:
        """Lets a leaving sequence continue to decode here."""
        del self.leaving[seq.request_id]
        self._join(seq)

    def end_late(self, seq: Sequence) -> None:
        """Keeps a sequence with a complete output until the next commit; see `Ends.one_step_late`.

        A sequence below its limits decodes once more, because only its newest tokens show that it has ended.
        """
        self.ending[seq.request_id] = seq
        if seq.state is PREFILLING:
            del self.prefilling[seq.request_id]
            if seq.num_known >= seq.max_num_tokens:
                seq.state = ENDING
            else:
                seq._end_known += 1
                self._join(seq)
        elif self.decodes.num_certain(seq) >= seq.max_num_tokens:
            self._note_unread(seq)
            self.decodes.leave(seq, ENDING)
        else:
            self.decodes.stay(seq)

    def hold(self, seq: Sequence) -> None:
        """Keeps slot and blocks of a sequence with a complete output; see `Ends.with_batch`."""
        self.ending[seq.request_id] = seq
        if seq.state is PREFILLING:
            del self.prefilling[seq.request_id]
            seq.state = ENDING
        else:
            self.decodes.leave(seq, ENDING)

    def leave(self, seq: Sequence, state: SequenceState) -> int | None:
        """Removes a sequence from its set and frees its slots; `release` must follow.

        state: the new state of the sequence. Returns the number of tokens for which the pool counts blocks as
        the sequence's own if its branches own the others, else None.
        """
        num_branched = None if seq.branches is None else num_prompt_block_tokens(seq)
        if seq.state is DECODING:
            if self.reads_late:
                self._note_unread(seq)
            if seq.branches is None:
                self.decodes.leave(seq, state)
            else:
                self.branched.leave(seq, state)
        elif seq.state is not ENDING:
            del self._members_of(seq.state)[seq.request_id]
        seq.state = state
        if self.ending:
            self.ending.pop(seq.request_id, None)
        del self.running[seq.request_id]
        if self.by_rank:
            del self.by_rank[seq.dp_rank][seq.request_id]
        assert seq.slot is not None
        heappush(self.free_slots, seq.slot)
        seq.slot = None
        if seq.more_slots:
            for slot in seq.more_slots:
                heappush(self.free_slots, slot)
            seq.more_slots = ()
        return num_branched

    def _members_of(self, state: SequenceState) -> dict[int, Sequence]:
        """Returns the set of sequences in a given state, other than decoding or ended."""
        if state is PREFILLING:
            return self.prefilling
        if state is PAUSED:
            return self.paused
        if state is LEAVING:
            return self.leaving
        return self.computing if state is COMPUTING else self.loading

    def release(self, seq: Sequence, num_branched: int | None, num_planned: int) -> None:
        """Frees the blocks of a sequence that has left.

        num_branched: the result of `leave`. num_planned: tokens of a plan that will not be computed.
        """
        if num_branched is None:
            num_lost = (num_planned or seq.num_unread) + seq.num_loading
            self._pool.release(seq, seq.stored_computed - seq.num_dropped + num_planned, num_lost)
        else:
            self._pool.release(seq, num_branched)
        seq.num_unread = 0
        if self._pool.num_state_blocks:
            self._pool.free_extra(self._pool.num_state_blocks, ())
        if seq.num_extra_blocks:
            self.branched.free_blocks(seq)

    def check_integrity(self, num_adapter_blocks: int = 0) -> None:
        """Asserts that blocks free + owned = all, slots have at most one owner, and sets match states."""
        running = list(self.running.values())
        self._pool.check_integrity((seq, self.num_pooled(seq)) for seq in running)
        num_extra_blocks = sum(seq.num_extra_blocks + self._pool.num_state_blocks for seq in running)
        assert self._pool.num_extra_blocks == num_extra_blocks + num_adapter_blocks
        self.branched.check_integrity()
        slots = [seq.slot for seq in running] + self.free_slots
        slots += [slot for seq in running for slot in seq.more_slots]
        assert all(len(seq.more_slots) == seq.width - 1 for seq in running)
        assert sorted(slots, key=lambda slot: -1 if slot is None else slot) == list(range(self._max_num_seqs))
        states: dict[SequenceState, set[int]] = {state: set() for state in SequenceState}
        for seq in running:
            states[seq.state].add(seq.request_id)
        decoding = {seq.request_id for seq in self.decodes} | set(self.branched.members)
        assert decoding == states[DECODING]
        assert set(self.prefilling) == states[PREFILLING]
        assert set(self.paused) == states[PAUSED]
        assert set(self.loading) == states[LOADING]
        assert set(self.leaving) == states[LEAVING]
        assert set(self.computing) == states[COMPUTING]
        assert states[ENDING] == {i for i, seq in self.ending.items() if seq.state is not DECODING}

    @staticmethod
    def _note_unread(seq: Sequence) -> None:
        """Sets a decoding sequence's number of unread tokens: 1 if the last step decoded it."""
        seq.num_unread = int(seq.num_computed > seq.stored_computed)

    def _join(self, seq: Sequence) -> None:
        """Adds a sequence to the decode set; if its KV has no room, it joins at its KV limit."""
        growth = self._pool.growth(seq) if self._asks_for_growth else PAGED
        self.decodes.join(seq, AT_LIMIT if growth is None else growth)

    def _end_decoding(self, seq: Sequence, state: SequenceState) -> None:
        """Stops decoding a sequence; its token counts are written back to it."""
        if seq.branches is None:
            self.decodes.leave(seq, state)
        else:
            self.branched.leave(seq, state)
