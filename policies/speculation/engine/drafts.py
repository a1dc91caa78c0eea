"""The draft tokens of a step as data, and the numbers of rows and levels of a proposer's drafts."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.core.sequence import Sequence
from policies.speculation import DraftLength, PassSeconds, Proposer, num_places

Ints = NDArray[np.int64]
NO_BLOCKS = np.zeros(1, np.int64)
ONE = np.ones(1, np.int64)
"""An array, because numpy adds a Python number more slowly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """Everything that an engine needs to speculate."""

    proposer: Proposer
    draft_length: DraftLength
    estimate: PassSeconds | None = None
    """The estimate of a pass for policies that need one."""
    tpot_s: float | None = None
    """Time per output token that the SLO allows, s; None: no SLO."""

    def __post_init__(self) -> None:
        if self.draft_length.needs_cost and self.estimate is None:
            raise ValueError(
                f"draft_length={type(self.draft_length).__name__}: needs an estimate of what a pass costs, "
                "and this engine has none; choose draft_length=fixed or by_batch_size"
            )


class Shapes:
    """Rows and levels of drafts: a chain of n tokens has n rows and n levels, a tree those of its nodes.

    depth [n + 1]: number of levels, by number of rows. rows [d + 1]: number of rows, by number of levels.
    """

    def __init__(self, proposer: Proposer) -> None:
        tree, num_rows = proposer.tree, proposer.num_speculative_tokens
        self.num_rows = num_rows
        """Maximum number of draft tokens of a pass."""
        self.max_depth = num_places(proposer)
        """Maximum number of draft tokens that a pass can accept."""
        self.is_chain = tree is None
        if tree is None:
            self.rows = np.arange(num_rows + 1)
        else:
            self.rows = np.array([tree.num_nodes_to(depth) for depth in range(tree.depth + 1)])
        self.depth = np.searchsorted(self.rows, np.arange(num_rows + 1), side="right") - 1

    def whole_levels(self, num_rows: Ints) -> Ints:
        """Cuts numbers of draft tokens to whole levels."""
        if self.is_chain:
            return num_rows
        cut: Ints = self.rows[self.depth[num_rows]]
        return cut


class DraftPlan:
    """The draft tokens of a plan, per decoding sequence, and the numbers of draft tokens for the next pass.

    seqs: decoding sequences, in the order of admission. slots, num_computed, base: their slots, computed
    tokens, and computed tokens as the scheduler counts them (see drafting.py). end: computed tokens at which
    each ends. num_drafts: draft tokens of each, in whole levels; depth: the maximum of them that can be
    accepted. next_drafts: draft tokens to make for the next pass of each of `next_seqs`: these sequences,
    then those that complete their prefill. next_levels: levels of the longest of these drafts, which are
    drafted one after the other. common: the number of draft tokens of every decoding sequence; None: they may
    differ. are_alike: whether every decoding sequence has the same number of draft tokens, now and for the
    next pass. reach: KV slots after `base` that each needs. Set by `judge`, once acceptances are known:
    accepted, totals [iterations, sequences]: accepted draft tokens, and computed tokens after each iteration,
    ignoring ends. sums [iterations]: tokens that all sequences get.
    """

    __slots__ = (
        "accepted", "are_alike", "base", "common", "depth", "end", "ids", "next_counts", "next_drafts",
        "next_levels", "next_seqs", "num_blocks", "num_changes", "num_computed", "num_drafts",
        "num_new_blocks", "num_tokens", "padded", "reach", "seqs", "slots", "sums", "totals",
    )  # fmt: skip

    def __init__(
        self,
        seqs: SequenceOf[Sequence],
        slots: Ints,
        num_computed: Ints,
        base: Ints,
        end: Ints,
        num_drafts: Ints,
        depth: Ints,
        reach: Ints,
        num_tokens: int,
    ) -> None:
        self.seqs = seqs
        self.slots = slots
        self.num_computed = num_computed
        self.base = base
        self.end = end
        self.num_drafts = num_drafts
        self.depth = depth
        self.reach = reach
        self.padded: dict[int, int] = {}
        """Rows without a draft token of just admitted requests, by request id."""
        self.num_tokens = num_tokens
        """Number of draft tokens and padding rows that one iteration computes."""
        self.next_seqs: SequenceOf[Sequence] = seqs
        self.next_drafts = num_drafts
        self.next_levels = 0
        self.next_counts = 0, 0
        """Number of sequences that get draft tokens for their next pass, and number of these draft tokens."""
        self.common: int | None = None
        self.ids = slots
        """Request ids, for the plans of an engine."""
        self.num_changes = -1
        """`DraftSet.num_changes` when the step was planned."""
        self.are_alike = False
        # What is accepted.
        self.accepted: Ints | None = None
        self.totals = NO_BLOCKS
        self.sums = NO_BLOCKS
        # The result of `Drafting.num_iterations_of` per iteration, if the plan is repeated.
        self.num_new_blocks: Ints = NO_BLOCKS
        """KV blocks of repeated iterations, summed; the first iteration already has its blocks."""
        self.num_blocks: Ints = NO_BLOCKS
        """KV blocks of each sequence [iterations, sequences]."""

    def judge(self, accepted: Ints) -> None:
        """Stores the acceptances, and the totals that follow from them."""
        self.accepted = accepted
        self.totals = totals = accepted + ONE
        self.sums = np.add.reduce(totals, axis=1)
        if len(accepted) > 1:
            np.add.accumulate(totals, axis=0, out=totals)
        totals += self.num_computed

    def pad(self, request_id: int, num_rows: int) -> None:
        """Adds rows without a draft token to a request that has one token to compute."""
        self.padded[request_id] = num_rows
        self.num_tokens += num_rows

    def by_request(self) -> dict[int, int]:
        """Returns the number of draft tokens and padding rows, by request id."""
        counts = zip(self.seqs, self.num_drafts.tolist(), strict=True)
        return {seq.request_id: num for seq, num in counts if num} | self.padded

    def decoded_after(self, num_iterations: int) -> Iterable[tuple[Sequence, int]]:
        """Returns the tokens of each sequence after iterations whose drafts have been verified."""
        num_computed = np.minimum(self.totals[num_iterations - 1], self.end)
        return zip(self.seqs, (num_computed - self.num_computed).tolist(), strict=True)

    def decision(self) -> object:
        """Returns the drafts by request and the next ones, for digests."""
        following = zip(self.next_seqs, self.next_drafts.tolist(), strict=True)
        return sorted(self.by_request().items()), sorted((seq.request_id, num) for seq, num in following)


def check_accepted(drafts: DraftPlan, accepted: Ints | None, num_iterations: int) -> Ints:
    """Returns the acceptances of an outcome; None: no sequence decodes.

    Raises ValueError if they do not belong to the drafts of its plan.
    """
    num_seqs = len(drafts.seqs)
    if accepted is None and not num_seqs:
        return np.zeros((num_iterations, 0), np.int64)
    shape = () if accepted is None else accepted.shape
    if shape != (num_iterations, num_seqs):
        raise ValueError(
            f"accepted has shape {shape}: must be ({num_iterations}, {num_seqs}), the iterations and the "
            "sequences of the plan's drafts"
        )
    assert accepted is not None
    is_wrong = accepted.view(np.uint64) > drafts.depth.view(np.uint64)  # a negative number is a large one
    if np.count_nonzero(is_wrong):
        raise ValueError("accepted: must be from 0 to the depth of each draft")
    return accepted
