"""The ranks of data-parallel attention, as a part of an engine: `EngineCore.ranks`.

Every rank computes attention for its own sequences, with its own KV memory, slots and token budget. The ranks
share the layers of experts, so all of them run every step together:

    enter   the front end sends a request to a rank, where it stays until it ends, preemptions included
    plan the policies fill the step of one rank after the other: they see only its sequences, free slots and
    KV blocks, and budgets apply per rank. A rank without tokens runs a dummy batch
    repeat  a plan holds until the first rank has an event, or runs out of its KV blocks

Limits of an engine and of its policies apply to all ranks together: each rank has an equal share, rounded
down (`policies.batching.of_rank`), as SGLang 0.5.23 divides `--chunked-prefill-size` and
`--max-running-requests` with `--enable-dp-attention`. vLLM 0.32 has a scheduler for each rank, whose
`--max-num-batched-tokens` and `--max-num-seqs` are such shares.

The front end's choice (`load_balance_method`):

    total_requests  the rank with the fewest unfinished requests; ties go to the next in turn. vLLM 0.32's
    `DPLBAsyncMPClient`, without its penalty for ranks with waiting requests and KV memory more than half
    full, and without the counts of several front ends, which are up to 0.1 s old
    round_robin     the ranks in turn: SGLang's default

Cached contents belong to one rank, because each rank has its own memory, but the contents of all ranks are
evicted in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from policies.batching import Batching, DataParallel, max_unasked_of, of_rank
from policies.caching.content import of_rank as content_of_rank
from policies.caching.pool import BlockPool
from policies.core.limits import Limits
from policies.core.plan import Chunk, RankWork, StepPlan
from policies.core.request import Request
from policies.core.sequence import DECODING, PAGED, Sequence, SequenceView
from policies.core.state import EngineState
from policies.core.step import StepBuilder
from policies.core.view import StepView

BeforeStep = Callable[[StepView, StepBuilder, float], None]
MORE_ATTEMPTS = 100
"""Attempts to fill the step of a rank in addition to one per slot, as in `EngineCore.plan`."""


class _OfRank(Mapping[int, Sequence]):
    """The sequences of a small set that belong to one rank, by request id."""

    def __init__(self, sequences: dict[int, Sequence], rank: int) -> None:
        self._sequences = sequences
        self._rank = rank

    def __iter__(self) -> Iterator[int]:
        return (id for id, seq in self._sequences.items() if seq.dp_rank == self._rank)

    def __len__(self) -> int:
        return sum(seq.dp_rank == self._rank for seq in self._sequences.values())

    def __getitem__(self, request_id: int) -> Sequence:
        return self._sequences[request_id]


class _FreeSlots:
    """The free slots of a rank, as a number."""

    def __init__(self, members: dict[int, Sequence], limit: int) -> None:
        self._members = members
        self._limit = limit

    def __len__(self) -> int:
        return self._limit - sum(seq.width for seq in self._members.values())


class _Scope(NamedTuple):
    """The part of an engine that its state exposes: all of it, or one rank."""

    running: dict[int, Sequence]
    prefilling: Mapping[int, Sequence]
    free_slots: Sized
    max_num_seqs: int


class Ranks:
    """The ranks of one engine: the sequences of each, and its share of the memory.

    The engine calls `place` for every request, and `plan` to build a step.
    """

    def __init__(
        self, state: EngineState, step: StepBuilder, settings: DataParallel, max_model_len: int
    ) -> None:
        size, pool = settings.size, state.block_pool
        if state.max_num_seqs < size:
            raise ValueError(
                f"max_num_seqs={state.max_num_seqs}: must be >= {size}, one for each rank of data-parallel "
                "attention"
            )
        if pool.num_blocks < size:
            raise ValueError(f"num_blocks={pool.num_blocks}: must be >= {size}, one for each rank")
        self.size = size
        self.max_num_seqs = state.max_num_seqs // size
        """Slots of each rank."""
        self.num_blocks = pool.num_blocks // size
        """KV blocks of each rank."""
        self.members: list[dict[int, Sequence]] = [{} for _ in range(size)]
        """Sequences with a slot by rank and request id, in the order of admission."""
        self.num_requests = [0] * size
        """Waiting and running sequences of each rank."""
        self._in_turn = settings.load_balance_method == "round_robin"
        self._next = 0  # the rank with which the search for the next request begins
        self._state, self._step, self._pool = state, step, pool
        self._num_watermark_blocks = pool.num_watermark_blocks // size
        self._whole = _Scope(state.running, state.prefilling, state.free_slots, state.max_num_seqs)
        self._scopes = [
            _Scope(
                own,
                _OfRank(state.running_set.prefilling, rank),
                _FreeSlots(own, self.max_num_seqs),
                self.max_num_seqs,
            )
            for rank, own in enumerate(self.members)
        ]
        self._views = [RankView(state, self, rank) for rank in range(size)]
        self._batching: list[Batching] = []
        self._num_free = [self.num_blocks] * size  # free blocks of each rank after its part of a step
        self._is_paged = type(pool).blocks_held is BlockPool.blocks_held
        self._is_drafting = state.decodes.holds_planned
        self._max_unasked = 0  # number of a rank's decodes up to which its policy need not be called
        step.is_of_rank = True
        state.running_set.by_rank = self.members
        state.limits = Limits(pool, self.max_num_seqs, max_model_len, self.num_blocks)
        state.on_end.append(self._leave)

    def use_batching(self, batching: Batching) -> None:
        """Gives each rank a copy of a batching policy, with the rank's share of the limits."""
        self._batching = [of_rank(batching, self.size) for _ in range(self.size)]
        self._max_unasked = max_unasked_of(self._batching[0])

    def place(self, seq: Sequence) -> None:
        """Chooses the rank of a request."""
        size, start, counts = self.size, self._next, self.num_requests
        in_turn = [*range(start, size), *range(start)]
        seq.dp_rank = rank = start if self._in_turn else min(in_turn, key=counts.__getitem__)
        counts[rank] += 1
        self._next = (start + 1) % size

    def num_waiting(self, rank: int) -> int:
        """Returns the number of waiting sequences of a rank."""
        return self.num_requests[rank] - len(self.members[rank])

    @property
    def num_with_prompts(self) -> int:
        """Number of ranks with a waiting prompt or one in prefill."""
        computing = {seq.dp_rank for seq in self._whole.prefilling.values()}
        return sum(rank in computing or self.num_waiting(rank) > 0 for rank in range(self.size))

    def peek(self, request: Request) -> int:
        """Returns the largest number of a prompt's tokens in the cache of any rank; changes nothing."""
        return max(self._pool.peek(content_of_rank(request, rank)) for rank in range(self.size))

    def _leave(self, seq: Sequence) -> None:
        self.num_requests[seq.dp_rank] -= 1

    # Steps.

    def plan(self, before_step: Iterable[BeforeStep], now: float) -> StepPlan | None:
        """Lets the policies fill the open step rank by rank, and ends it; None if it computes no token."""
        self._fill(before_step, now)
        plan = self._step.end()
        if plan is not None:
            self._complete(plan)
        return plan

    def _fill(self, before_step: Iterable[BeforeStep], now: float) -> None:
        """Lets the policies fill the step of each rank that has sequences."""
        pool, step = self._pool, self._step
        self._num_free = self._count_free()
        step.begin_ranks()
        for rank in range(self.size):
            if not self.num_requests[rank]:
                continue
            num_free = pool.num_free
            self._show(self._scopes[rank], num_free - self._num_free[rank])
            try:
                self._fill_rank(rank, before_step, now)
            finally:
                self._show(self._whole, 0)
                self._num_free[rank] -= num_free - pool.num_free

    def _fill_rank(self, rank: int, before_step: Iterable[BeforeStep], now: float) -> None:
        """Lets the policies fill the step of a rank, and repeats while they only free blocks."""
        step, own = self._step, self.members[rank]
        if not before_step and len(own) == self.num_requests[rank] and self._all_decode(own):
            step.begin_rank()
            step.decode_all()
            step.repeat()
            step.end_rank()
            return
        for _ in range(self.max_num_seqs + MORE_ATTEMPTS):
            if not self._ask_rank(rank, before_step, now):
                return

    def _all_decode(self, own: dict[int, Sequence]) -> bool:
        """Returns whether a rank needs no decision because all of its sequences get a token."""
        if len(own) > self._max_unasked or self._is_drafting:
            return False
        return all(seq.state is DECODING and seq.branches is None for seq in own.values())

    def _ask_rank(self, rank: int, before_step: Iterable[BeforeStep], now: float) -> bool:
        """Lets the policies fill the step of a rank; returns whether it has only freed blocks."""
        step, view = self._step, self._views[rank]
        step.begin_rank()
        try:
            for act in before_step:
                act(view, step, now)
            self._batching[rank].fill(view, step, now)
        finally:
            has_only_freed = step.end_rank()
        return has_only_freed

    def _show(self, scope: _Scope, num_reserved: int) -> None:
        """Shows one rank or all to state and builder; num_reserved: free blocks of the other ranks."""
        state = self._state
        state.running, state.prefilling, state.free_slots, state.max_num_seqs = scope
        state.num_reserved = num_reserved
        state.num_watermark_blocks = self._pool.num_watermark_blocks = self._num_watermark_blocks

    def _count_free(self) -> list[int]:
        """Counts the free blocks of each rank, between two steps.

        Shared blocks and blocks that belong to no sequence count in proportion.
        """
        pool = self._pool
        used = [self._blocks_of(own.values()) for own in self.members]
        num_owned, num_used = sum(used), pool.num_used
        if num_owned > num_used:
            used = [-(-num * num_used // num_owned) for num in used]
        elif num_owned < num_used:
            num_more = -(-(num_used - num_owned) // self.size)
            used = [num + num_more for num in used]
        return [min(max(self.num_blocks - num, 0), pool.num_free) for num in used]

    def _blocks_of(self, sequences: Iterable[Sequence]) -> int:
        """Counts the blocks that running sequences own."""
        pool, pooled = self._pool, self._state.running_set.num_pooled
        if self._is_paged and not (pool.num_extra_blocks or self._is_drafting):
            above, block_size = pool.block_size - 1, pool.block_size
            return sum([(held + above) // block_size for held in self._held_by(sequences)])
        return sum(
            pool.blocks_held(seq, pooled(seq)) + seq.num_extra_blocks + pool.num_state_blocks
            for seq in sequences
        )

    def _held_by(self, sequences: Iterable[Sequence]) -> list[int]:
        """Returns `Sequence.num_held` of each sequence, in one pass over all of a rank."""
        clock = self._state.decodes.clock
        return [
            seq.origin + clock - seq.num_dropped
            if seq.state is DECODING and seq.growth is PAGED
            else seq.num_held
            for seq in sequences
        ]

    # Plans.

    def _complete(self, plan: StepPlan) -> None:
        """Adds the work of each rank to a plan; its horizon ends when the first rank runs out of blocks."""
        idle = set(plan.idle) if plan.num_decodes else ()
        drafts = plan.drafts.by_request() if plan.drafts is not None else {}
        chunks: list[list[Chunk]] = [[] for _ in range(self.size)]
        for chunk in plan.chunks:
            chunks[chunk.seq.dp_rank].append(chunk)
        works = []
        for rank, own in enumerate(self.members):
            decodes: list[Sequence] = []
            if plan.num_decodes > plan.num_branches:
                decodes = [
                    seq
                    for seq in own.values()
                    if seq.state is DECODING and seq.branches is None and seq not in idle
                ]
            branched = [seq for seq in plan.branched if seq.dp_rank == rank]
            num_context_tokens = sum(self._held_by(decodes)) if plan.drafts is None else 0
            works.append(_work_of(plan, decodes, num_context_tokens, branched, chunks[rank], drafts))
            if plan.horizon > 1:
                plan.horizon = self._cut(plan.horizon, decodes, chunks[rank], self._num_free[rank])
        plan.ranks = works

    def _cut(
        self, horizon: int, decodes: SequenceOf[Sequence], chunks: SequenceOf[Chunk], num_free: int
    ) -> int:
        """Returns the iterations for which a rank has blocks, up to `horizon`."""
        block_size, num_tables = self._pool.block_size, self._pool.num_tables
        most = len(decodes) * (horizon // block_size + 1)
        most += sum(chunk.num_tokens * horizon // block_size + 1 for chunk in chunks)
        if most * num_tables <= num_free:
            return horizon
        grown = [(seq.num_held + 1, 1) for seq in decodes if seq.growth.takes_blocks]
        grown += [(chunk.num_cached + chunk.num_tokens, chunk.num_tokens) for chunk in chunks]
        low, high = 1, horizon
        while low < high:
            middle = (low + high + 1) // 2
            num_blocks = sum(
                -(-(held + (middle - 1) * each) // block_size) + -held // block_size for held, each in grown
            )
            low, high = (middle, high) if num_blocks * num_tables <= num_free else (low, middle - 1)
        return low

    def check_integrity(self) -> None:
        """Asserts that every sequence belongs to one rank, and that no rank exceeds its slots and blocks."""
        running = self._state.running_set.running
        assert sum(map(len, self.members)) == len(running)
        assert sum(self.num_requests) == len(self._state.sequences)
        for rank, own in enumerate(self.members):
            assert all(running[id] is seq and seq.dp_rank == rank for id, seq in own.items())
            assert sum(seq.width for seq in own.values()) <= self.max_num_seqs
            assert not self._is_paged or self._blocks_of(own.values()) <= self.num_blocks


def _work_of(
    plan: StepPlan,
    decodes: SequenceOf[Sequence],
    num_context_tokens: int,
    branched: Iterable[Sequence],
    chunks: SequenceOf[Chunk],
    drafts: Mapping[int, int],
) -> RankWork:
    """Returns the work of a rank in the first iteration of a plan.

    decodes: sequences that decode without branches, which hold num_context_tokens, branched: those with
    branches. drafts: draft tokens by request id.
    """
    num_decodes, num_draft_tokens, num_draft_pairs = len(decodes), 0, 0
    if plan.drafts is None:
        num_widening = sum([seq.growth.widens for seq in decodes])
        num_context_tokens += num_widening
    else:
        num_widening = 0
        num_context_tokens = num_decodes + sum([seq.num_computed for seq in decodes])
        for seq in (*decodes, *(chunk.seq for chunk in chunks)):
            num_rows = drafts.get(seq.request_id, 0)
            num_draft_tokens += num_rows
            num_draft_pairs += num_rows * seq.num_computed + num_rows * (num_rows + 3) // 2
    for seq in branched:
        branches = seq.branches
        assert branches is not None
        num_decodes += branches.width
        num_widening += branches.width
        num_context_tokens += branches.width * (branches.num_shared_tokens + branches.length)
    return RankWork(num_decodes, num_context_tokens, num_widening, chunks, num_draft_tokens, num_draft_pairs)


class RankView(StepView):
    """One rank as policies see it: its sequences, and its share of slots and memory."""

    def __init__(self, state: EngineState, ranks: Ranks, rank: int) -> None:
        StepView.__init__(self, state)
        self._ranks = ranks
        self._rank = rank

    @property
    def num_ranks(self) -> int:
        return self._ranks.size

    @property
    def num_prompts(self) -> int:
        """Number of ranks with a waiting prompt or one in prefill."""
        return self._ranks.num_with_prompts

    @property
    def paused(self) -> SequenceOf[SequenceView]:
        paused = self._state.running_set.paused
        return [seq for seq in paused.values() if seq.dp_rank == self._rank]

    @property
    def waiting(self) -> Iterable[SequenceView]:
        if not self.num_waiting:
            return ()
        waiting = self._state.candidates()
        return (seq for seq in waiting if isinstance(seq, Sequence) and seq.dp_rank == self._rank)

    @property
    def num_decoding(self) -> int:
        return sum(seq.state is DECODING for seq in self._state.running.values())

    @property
    def num_waiting(self) -> int:
        return self._ranks.num_waiting(self._rank)

    @property
    def num_blocks(self) -> int:
        return self._ranks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._state.num_free_blocks - self._state.num_reserved
