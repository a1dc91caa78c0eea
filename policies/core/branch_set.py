"""The sequences that decode with branches: parallel samples, beam search and tree search.

A request with several outputs (`Request.branching`) is one sequence. Its prompt is computed once. The
sequence then continues as branches, which are not part of the decode set, share KV blocks by reference and
copy them on write (policies/caching/block_tables.py). It takes one slot per branch and is preempted as a
whole. If it is recomputed, one prefill computes all the tokens that it had stored. While it decodes, the pool
counts the full blocks of its prompt as blocks of the sequence. All other blocks belong to its branches;
`Sequence.num_extra_blocks` counts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import takewhile
from typing import NamedTuple

from policies.caching.block_tables import Branches
from policies.caching.pool import BlockPool
from policies.core.limits import StopAfter
from policies.core.plan import StepPlan
from policies.core.request import Branching
from policies.core.sequence import DECODING, PAGED, PAUSED, PREFILLING, Sequence, SequenceState


class Piece(NamedTuple):
    """Consecutive tokens of one branch in one block.

    number: number of the block in `Branches`; None: the tokens are in the prompt's full blocks.
    """

    branch: int
    position: int
    num_tokens: int
    number: int | None


class BranchSet:
    """The sequences that decode with branches, and blocks and slots of all sequences with branches.

    free_slots: the free slots of the engine, a heap.
    """

    def __init__(self, pool: BlockPool, free_slots: list[int]) -> None:
        self.members: dict[int, Sequence] = {}
        """The decoding members by request id, in the order in which they began to decode."""
        self._pool = pool
        self._free_slots = free_slots

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.members.values())

    @property
    def num_tokens_held(self) -> int:
        """Number of tokens with KV in the members' blocks."""
        return sum(seq.num_held for seq in self)

    def prepare(self, seq: Sequence, branching: Branching, stop_after: StopAfter) -> None:
        """Records the ends of the branches of a new sequence and the blocks that they will need."""
        limit = seq.max_num_tokens - seq.num_prompt_tokens
        if not isinstance(stop_after, tuple):
            stop_after = (limit if stop_after is None else stop_after,) * branching.width
        seq._branch_ends = tuple(min(limit, num_tokens) for num_tokens in stop_after)
        seq.num_extra_blocks = self._num_copied_blocks(seq)

    def start(self, seq: Sequence) -> None:
        """Assigns slots and blocks to the further branches of an admitted sequence, which holds one slot."""
        seq.more_slots = tuple(heappop(self._free_slots) for _ in range(seq.width - 1))
        branches = seq.branches
        if branches is not None and branches.is_swapped:  # the blocks of the next tokens are counted later
            num_known, blocks_for = seq.stored_known, self._pool.blocks_for
            seq.num_extra_blocks += blocks_for(num_known) - blocks_for(num_known - 1)
            seq.num_extra_blocks -= branches.blocks_to_append()
        self._pool.take_extra(seq.num_extra_blocks)

    def stop(self, seq: Sequence, had_joined: bool) -> None:
        """Computes the blocks that a preempted sequence will need when it is admitted again."""
        if seq.branches is not None:
            self._prepare_return(seq, seq.branches, had_joined)
        else:
            seq.num_extra_blocks = self._num_copied_blocks(seq)

    def fork(self, seq: Sequence) -> None:
        """Starts decoding a sequence after its prefill; its branches are created the first time."""
        if seq.branches is None:
            shares = self._pool.shares_branches
            seq.branches = Branches(seq.num_prompt_tokens, self._pool.block_size, seq._branch_ends, shares)
        self.join(seq, seq.branches)

    def join(self, seq: Sequence, branches: Branches) -> None:
        """Starts decoding a sequence that has KV for all tokens of its branches except the newest ones."""
        num_before = self._pool.num_extra_blocks
        ids = self._pool.move_to_branches(seq, seq.stored_computed, branches.num_shared_tokens)
        seq.num_extra_blocks += self._pool.num_extra_blocks - num_before
        unused = [block for block in ids if block not in branches.ids.values()]
        unnamed = [number for number in branches.numbers if number not in branches.ids]
        branches.ids |= zip(unnamed, unused, strict=False)  # only ids that were requested
        seq.clock_source = branches
        seq.growth = PAGED
        self.resume(seq, branches)

    def resume(self, seq: Sequence, branches: Branches) -> None:
        """Starts decoding a paused sequence, or one with complete KV."""
        seq.state = DECODING
        seq.origin = branches.num_shared_tokens
        self.members[seq.request_id] = seq

    def leave(self, seq: Sequence, state: SequenceState) -> None:
        """Removes a sequence that stops decoding; its token counts are written back to it."""
        seq.stored_computed = seq.num_computed
        seq.stored_known = seq.stored_computed + 1
        seq.state = state
        del self.members[seq.request_id]

    def produce(self, seq: Sequence, parents: tuple[int, ...] | None) -> bool:
        """Adds a new token to each branch of a member. Returns whether all its branches have ended.

        parents: for each new branch, the old branch that it continues, as the executor has chosen; see
        `Branches.produce`.
        """
        branches = seq.branches
        assert branches is not None
        if parents is not None and not (parents and all(0 <= p < branches.width for p in parents)):
            raise ValueError(f"parents={parents} of {seq!r}: must name branches below {branches.width}")
        if parents is not None and len(parents) > branches.width:
            raise ValueError(f"parents={parents} of {seq!r}: must name at most {branches.width} branches")
        freed = branches.produce(parents)
        if branches.all_ended:
            return True
        while len(seq.more_slots) >= branches.width:
            heappush(self._free_slots, seq.more_slots[-1])
            seq.more_slots = seq.more_slots[:-1]
        if freed:
            ids = [branches.ids.pop(number) for number in freed if number in branches.ids]
            self._pool.free_extra(len(freed), ids)
            seq.num_extra_blocks -= len(freed)
        return False

    def free_blocks(self, seq: Sequence) -> None:
        """Frees the blocks of a sequence's branches and those reserved for them."""
        branches = seq.branches
        ids = [] if branches is None else list(branches.ids.values())
        if branches is not None:
            branches.ids = {}
        self._pool.free_extra(seq.num_extra_blocks, ids)
        seq.num_extra_blocks = 0

    def plan(self, plan: StepPlan, decoded: dict[int, Sequence]) -> None:
        """Adds the sequences that decode with branches to a plan.

        Their block tables change at each step, so the plan holds for one iteration.
        """
        plan.horizon = 1
        plan.branched = branched = []
        for seq in self:
            branches = seq.branches
            assert branches is not None
            if seq.request_id not in decoded:
                continue
            branched.append(seq)
            plan.num_copied_tokens += branches.append()
            plan.num_branches += branches.width
            plan.num_decode_context_tokens += branches.width * (branches.num_shared_tokens + branches.length)
        plan.num_decodes += plan.num_branches
        plan.num_widening += plan.num_branches

    def block_ids(self, seq: Sequence) -> list[list[int]]:
        """Returns the physical ids of the blocks of each branch of a member, planned blocks included."""
        branches = seq.branches
        assert branches is not None
        shared = self._pool.block_ids(seq, branches.num_shared_tokens)
        self._draw(branches)
        return [shared + [branches.ids[number] for number in table] for table in branches.tables]

    def context_len(self, seq: Sequence) -> int:
        """Returns the KV tokens that each branch of a member attends to, a planned token included."""
        branches = seq.branches
        assert branches is not None
        return branches.num_shared_tokens + branches.length

    def num_stored_blocks(self, seq: Sequence) -> int:
        """Counts the blocks that hold the stored tokens of all branches, partly filled ones included."""
        branches = seq.branches
        assert branches is not None
        return branches.num_shared_tokens // self._pool.block_size + branches.num_blocks

    def stored_ids(self, seq: Sequence) -> list[int]:
        """Returns the physical ids of the blocks that `num_stored_blocks` counts.

        The prompt's full blocks come first, then the branches' blocks in the order of `Branches.numbers`.
        """
        branches = seq.branches
        assert branches is not None
        ids = self._pool.block_ids(seq, branches.num_shared_tokens)
        self._draw(branches)
        return ids + [branches.ids[number] for number in branches.numbers]

    def extra_ids(self, seq: Sequence) -> list[int]:
        """Assigns ids to the branches' own blocks of a sequence that is swapped in, and returns the ids.

        They follow the blocks that the pool counts as the sequence's own. Returns no ids for other sequences.
        """
        branches = seq.branches
        if branches is None or not branches.is_swapped:
            return []
        ids = self._pool.draw(seq.num_extra_blocks)
        first = branches.num_blocks - seq.num_extra_blocks
        branches.ids = dict(zip(branches.numbers[first:], ids, strict=True))
        return ids

    def is_recomputing(self, seq: Sequence) -> bool:
        """Returns whether a sequence in prefill recomputes the tokens that its branches had stored."""
        return seq.branches is not None and seq.state is PREFILLING

    def recomputed(self, seq: Sequence, first: int, num_tokens: int) -> list[Piece]:
        """Returns the locations of tokens from `first` on of a prefill that recomputes branches.

        The tokens of the prompt's full blocks come first, then the branches' own blocks one after the other,
        so that every token follows the tokens that it attends to. Also assigns physical ids to the blocks.
        """
        branches = seq.branches
        assert branches is not None
        num_shared, end = branches.num_shared_tokens, first + num_tokens
        pieces = []
        if first < num_shared:
            pieces.append(Piece(0, first, min(end, num_shared) - first, None))
        place = num_shared
        for number, branch, position, size in branches.layout():
            begin, stop = max(first, place), min(end, place + size)
            if begin < stop:
                pieces.append(Piece(branch, position + begin - place, stop - begin, number))
            place += size
        num_own = num_shared // self._pool.block_size
        own = self._pool.block_ids(seq, end)[num_own:]
        free = [block for block in own if block not in branches.ids.values()]
        for piece in pieces:
            if piece.number is not None and piece.number not in branches.ids:
                branches.ids[piece.number] = free.pop(0) if free else self._pool.draw(1)[0]
        return pieces

    def known_ids(self, seq: Sequence, num_tokens: int) -> list[list[int]]:
        """Returns the physical ids of the blocks of each branch, as far as `recomputed` has assigned them."""
        branches = seq.branches
        assert branches is not None
        num_shared, ids = branches.num_shared_tokens, branches.ids
        shared = self._pool.block_ids(seq, min(num_tokens, num_shared))
        shared = shared[: num_shared // self._pool.block_size]
        named = [takewhile(ids.__contains__, table) for table in branches.tables]
        return [shared + [ids[number] for number in table] for table in named]

    def copies(self, plan: StepPlan) -> list[tuple[int, int]]:
        """Returns the KV blocks to copy before a plan is run, as pairs of physical ids (source, target)."""
        pairs = []
        for seq in plan.branched:
            branches = seq.branches
            assert branches is not None
            self.block_ids(seq)
            pairs += [(branches.ids[source], branches.ids[target]) for source, target in branches.copies]
        return pairs

    def check_integrity(self) -> None:
        """Asserts that the blocks of each member are those of its branches."""
        for seq in self:
            assert seq.branches is not None
            assert seq.num_extra_blocks == seq.branches.num_blocks
            seq.branches.check_integrity()

    def _draw(self, branches: Branches) -> None:
        """Assigns physical ids to the blocks of the branches that have none."""
        for number in branches.numbers:
            if number not in branches.ids:
                branches.ids[number] = self._pool.draw(1)[0]

    def _num_copied_blocks(self, seq: Sequence) -> int:
        """Counts the blocks for copies of a prompt for further branches; 0 if branches share it."""
        if self._pool.shares_branches:
            return 0
        return (seq.width - 1) * self._pool.blocks_for(seq.num_prompt_tokens)

    def _prepare_return(self, seq: Sequence, branches: Branches, had_joined: bool) -> None:
        """Computes the blocks that a sequence with branches needs when it is admitted again.

        It needs blocks for all tokens that it had stored. If it is recomputed, the newest token of each
        branch is computed as well and needs a block. If it was swapped out, it needs room for these tokens,
        because otherwise it could be loaded and preempted again and again.
        """
        branches.is_swapped = had_joined and seq.num_swapped > 0
        if had_joined:
            if not branches.is_swapped:
                branches.append()
            seq.stored_known = branches.num_shared_tokens + branches.clock + branches.is_swapped
        num_blocks = branches.num_shared_tokens // self._pool.block_size + branches.num_blocks
        if branches.is_swapped:
            num_blocks += branches.blocks_to_append()
        seq.num_extra_blocks = num_blocks - self._pool.blocks_for(seq.stored_known)


def num_prompt_block_tokens(seq: Sequence) -> int | None:
    """Returns the tokens in the prompt's full blocks if branches own all other blocks, else None."""
    if seq.branches is None or seq.state not in (DECODING, PAUSED):
        return None
    return seq.branches.num_shared_tokens
