"""The sequences that get one token every iteration, advanced together in constant time.

The context of each member grows by one token per iteration, so it is stored as `origin + clock`; advancing by
k iterations adds k to one clock. A member needs a new KV block whenever the number of KV tokens that it holds
is a multiple of the block size, which is when the clock is congruent to dropped - origin. The set counts its
members by that residue, which gives the blocks of any number of iterations without a loop over members. A
heap sorted by clock holds the ends of members. Another holds their KV limits, if a pool sets any: at its
limit a member stops needing blocks, or needs them at another rate.

The array that an engine uploads (computed tokens by slot) is built on access.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from policies.caching.pool import BlockPool
from policies.core.plan import StepPlan
from policies.core.sequence import DECODING, PAGED, PREFILLING, Growth, Sequence, SequenceState


class DecodeSet:
    """The decoding sequences, their common clock, and the blocks that the next iterations need.

    clock counts iterations in which the set decoded; num_context_tokens is the sum of the KV tokens that the
    members hold. blocks_due_by_phase[p] counts the blocks that members need when clock % block_size == p:
    num_tables for each. at_limit: members, by request id, for which the pool must be asked before they
    continue. running: all sequences with a slot, by request id; the members are among them.
    """

    holds_planned = False
    """Whether a leaving member keeps the blocks of its planned tokens, as extra blocks."""

    def __init__(
        self, max_num_seqs: int, block_size: int, running: Mapping[int, Sequence], num_tables: int = 1
    ) -> None:
        self.clock = 0
        self.size = 0
        self.num_context_tokens = 0
        self.block_size = block_size
        self.blocks_due_by_phase = array("I", [0] * block_size)
        self.at_limit: dict[int, Sequence] = {}
        self._running = running
        self.ends: list[tuple[int, int, int, Sequence]] = []  # end clock, request id, join, member
        self._limits: list[tuple[int, int, int, Sequence]] = []  # KV limit clock, request id, join, member
        self.num_joins = 0
        self.num_steady = 0
        """Number of members with a context that does not grow (sliding window)."""
        self._num_reserved = 0  # members that have all their blocks
        self._max_num_seqs = max_num_seqs
        self._num_tables = num_tables

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, Sequence) and seq.state is DECODING and seq.clock_source is self

    def __iter__(self) -> Iterator[Sequence]:
        return iter([seq for seq in self._running.values() if seq in self])

    @property
    def num_widening(self) -> int:
        """Number of members with a growing context."""
        return self.size - self.num_steady

    @property
    def num_computed_S(self) -> NDArray[np.int64]:
        """Computed tokens by slot [max_num_seqs]; 0 where no sequence decodes. A new array."""
        num_computed_S = np.zeros(self._max_num_seqs, np.int64)
        for seq in self:
            num_computed_S[seq.slot] = seq.origin + self.clock
        return num_computed_S

    def join(self, seq: Sequence, growth: Growth = PAGED) -> None:
        """Adds a sequence that holds a slot and has computed all its known tokens except the newest."""
        num_computed, clock = seq.stored_computed, self.clock
        seq.origin = origin = num_computed - clock
        seq.join_number = number = self.num_joins = self.num_joins + 1
        seq.state = DECODING
        seq.growth = growth
        num_held = num_computed - seq.num_dropped
        self.size += 1
        self.num_context_tokens += num_held
        if growth is PAGED:
            self.blocks_due_by_phase[(clock - num_held) % self.block_size] += self._num_tables
        else:
            self._begin_growth(seq, growth)
        heappush(self.ends, (seq._end_known - 1 - origin, seq.request_id, number, seq))
        if len(self.ends) > 4 * self.size + 64:
            self._forget_departed()

    def _forget_departed(self) -> None:
        """Drops the heap entries of sequences that have left.

        A prefill-only engine transfers all its sequences, so its clock never reaches their ends.
        """
        for entries in (self.ends, self._limits):
            entries[:] = [entry for entry in entries if self._is_current(entry[2], entry[3])]
            heapify(entries)

    def stay(self, seq: Sequence) -> None:
        """Keeps a member that has just ended for one more token."""
        seq._end_known += 1
        self.expect_end(seq)

    def expect_end(self, seq: Sequence) -> None:
        """Adds the end of a member to the heap of ends."""
        heappush(self.ends, (seq._end_known - 1 - seq.origin, seq.request_id, seq.join_number, seq))

    def leave(self, seq: Sequence, state: SequenceState) -> None:
        """Removes a member; its token counts are written back to it, and its state becomes `state`."""
        clock = self.clock
        seq.stored_computed = num_computed = seq.origin + clock
        seq.stored_known = num_computed + 1
        seq.state = state
        self.size -= 1
        if seq.growth is not PAGED:
            self._end_growth(seq, seq.growth)
            return
        num_held = num_computed - seq.num_dropped
        self.num_context_tokens -= num_held
        self.blocks_due_by_phase[(clock - num_held) % self.block_size] -= self._num_tables

    def _begin_growth(self, seq: Sequence, growth: Growth) -> None:
        """Counts a member that needs no blocks, has a context of constant length, or has a KV limit."""
        if growth.takes_blocks:
            self.blocks_due_by_phase[(seq.num_dropped - seq.origin) % self.block_size] += self._num_tables
        else:
            self._num_reserved += 1
        if not growth.widens:
            self.num_steady += 1
            seq.steady_from = seq.stored_computed
        if growth.until is not None:
            limit_clock = growth.until - seq.origin
            if limit_clock <= self.clock:
                self.at_limit[seq.request_id] = seq
            else:
                heappush(self._limits, (limit_clock, seq.request_id, seq.join_number, seq))

    def _end_growth(self, seq: Sequence, growth: Growth) -> None:
        """Removes a member from all counts to which `_begin_growth` added it."""
        if growth.takes_blocks:
            self.blocks_due_by_phase[(seq.num_dropped - seq.origin) % self.block_size] -= self._num_tables
        else:
            self._num_reserved -= 1
        if not growth.widens:
            self.num_steady -= 1
            seq.num_dropped += seq.stored_computed - seq.steady_from
        self.num_context_tokens -= seq.stored_computed - seq.num_dropped
        if growth.until is not None:
            self.at_limit.pop(seq.request_id, None)

    def advance(self, num_iterations: int, idle: SequenceOf[Sequence]) -> list[Sequence]:
        """Decodes num_iterations tokens of every member except the idle ones; returns the members that end.

        The ended sequences are still members; they are sorted by end, then by request id.
        """
        if idle:
            for seq in idle:
                self.leave(seq, PREFILLING)
        self.clock = clock = self.clock + num_iterations
        self.num_context_tokens += num_iterations * (self.size - self.num_steady)
        if idle:
            for seq in idle:
                self.join(seq, seq.growth)
        if self._limits:
            self._reach_limits()
        ends, ended = self.ends, []
        while ends and ends[0][0] <= clock:
            _, _, number, seq = heappop(ends)
            if seq.state is DECODING and seq.join_number == number:
                ended.append(seq)
        return ended

    def _reach_limits(self) -> None:
        while self._limits and self._limits[0][0] <= self.clock:
            _, request_id, join, seq = heappop(self._limits)
            if self._is_current(join, seq):
                self.at_limit[request_id] = seq

    def iterations_to_first_event(self) -> int:
        """Computes the iterations until the first member ends or reaches its KV limit, if all decode.

        The set must have a member.
        """
        ends = self.ends
        first, _, join, seq = ends[0]
        while seq.state is not DECODING or seq.join_number != join:
            heappop(ends)
            first, _, join, seq = ends[0]
        limits = self._limits
        if limits:
            while limits and not self._is_current(limits[0][2], limits[0][3]):
                heappop(limits)
            if limits and limits[0][0] < first:
                first = limits[0][0]
        return first - self.clock

    def needs_block(self, seq: Sequence) -> bool:
        """Returns whether the next token of a member needs a new KV block."""
        return seq.growth.takes_blocks and seq.num_held % self.block_size == 0

    def num_pooled(self, seq: Sequence) -> int:
        """Counts the tokens for which the pool counts blocks as a member's own."""
        return seq.num_held

    def num_certain(self, seq: Sequence) -> int:
        """Counts a member's tokens known to the next plan, before the last step's tokens are read."""
        return seq.num_known

    def blocks_due(self) -> int:
        """Counts the KV blocks that the next iteration needs."""
        return self.blocks_due_by_phase[self.clock % self.block_size]

    def blocks_due_after(self, num_skipped: int, num_iterations: int) -> int:
        """Counts the KV blocks that num_iterations iterations need, after the next num_skipped ones."""
        counts, block_size = self.blocks_due_by_phase, self.block_size
        begin = (self.clock + num_skipped) % block_size
        end = begin + num_iterations
        if end <= block_size:
            return sum(counts[begin:end])
        num_turns, end = divmod(end, block_size)
        num_due = (self.size - self._num_reserved) * self._num_tables
        return sum(counts[:end]) + num_turns * num_due - sum(counts[:begin])

    @staticmethod
    def _is_current(join: int, seq: Sequence) -> bool:
        """Returns whether a heap entry is valid; entries of former members stay in the heap."""
        return seq.state is DECODING and seq.join_number == join


def cut_horizon(plan: StepPlan, decodes: DecodeSet, pool: BlockPool) -> int:
    """Returns the iterations for which a plan can be run unchanged: from 1 to the promised number."""
    horizon = plan.horizon
    if plan.num_decodes:
        first_event = decodes.iterations_to_first_event()
        if first_event < horizon:
            horizon = first_event
    for chunk in plan.chunks:  # the last chunk of a prefill is a separate step
        horizon = min(horizon, (chunk.seq.num_uncomputed - 1) // chunk.num_tokens)
    num_free = pool.num_free_without_copy
    if plan.chunks or plan.num_decodes * (horizon // pool.block_size + 1) > num_free:  # else they suffice
        repeats = range(horizon)
        return bisect_right(repeats, num_free, key=lambda num: blocks_of_repeats(plan, num, decodes, pool))
    return horizon


def blocks_of_repeats(plan: StepPlan, num_repeats: int, decodes: DecodeSet, pool: BlockPool) -> int:
    """Counts the blocks for num_repeats further iterations of a plan; the first iteration has its blocks."""
    num_blocks = decodes.blocks_due_after(1, num_repeats) if plan.num_decodes else 0
    for chunk in plan.chunks:
        first = chunk.num_cached + chunk.num_tokens
        num_blocks += pool.blocks_to_grow(chunk.seq, first, first + num_repeats * chunk.num_tokens)
    return num_blocks
