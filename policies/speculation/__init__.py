"""Speculative decoding: proposers draft tokens, draft-length policies decide how many. One per file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from policies.speculation.tree import TokenTree
from policies.speculation.view import DraftView


class SlotRules(NamedTuple):
    """The rules of a proposer for KV slots and budgets, as in vLLM 0.32."""

    keeps_lookahead: bool = False
    """Whether KV slots for num_speculative_tokens more tokens are kept behind each sequence."""
    num_input_slots: int = 0
    """Further tokens that each request takes from max_num_batched_tokens."""
    drops_last_block: bool = False
    """Whether the last block of a prefix-cache hit is computed again."""
    prefill_lookahead: int = 0
    """A chunk of a prompt ends at its last token or at least so many tokens before it."""
    overlaps: bool = True
    """Whether it works with asynchronous scheduling; if not, the engine schedules synchronously."""


class Proposer(Protocol):
    """Drafts tokens: a frozen dataclass of settings. The real engine adds the computation by its method."""

    method: ClassVar[str]
    """The name of the method in vLLM's --speculative-config."""

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum number of draft tokens of a sequence in one pass; the nodes of its tree, if it has one."""
        ...

    @property
    def tree(self) -> TokenTree | None:
        """The tree of the draft tokens; None: each continues the one before it."""
        ...

    @property
    def rules(self) -> SlotRules:
        """The rules for KV slots and budgets."""
        ...

    @property
    def draft(self) -> object:
        """The cost and the memory of a draft, which only the hardware models read."""
        ...


def num_places(proposer: Proposer) -> int:
    """Returns the maximum number of draft tokens of a pass that can be accepted."""
    return proposer.num_speculative_tokens if proposer.tree is None else proposer.tree.depth


@runtime_checkable
class DraftLength(Protocol):
    """Decides how many tokens are drafted. Each engine has a deep copy, so a policy may have state."""

    needs_cost: ClassVar[bool]
    """Whether it calls `DraftView.pass_seconds`; without an estimate the engine refuses such a policy."""
    reads_sequences: ClassVar[bool]
    """Whether it reads the arrays of `DraftView` with one number per sequence."""

    @property
    def num_repeats(self) -> int:
        """Number of steps, from the one it has just decided on, in which it is sure to decide the same.

        It may assume that the same number of sequences gets a token in each of them. 1: it promises nothing.
        """
        ...

    def num_draft_tokens(self, view: DraftView) -> int | NDArray[np.int64]:
        """Returns the number of tokens to draft, 0 to view.max_draft_tokens.

        One number for all sequences, or an array with one number per sequence in the order of view.sequences.
        With a tree, the number is a depth: the first levels of the tree are used.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLengthTraits:
    """Members that a draft-length policy may have beside those of its protocol."""

    needs_tpot: bool = False
    """Whether the run must have an SLO with a TPOT."""
    num_tokens: int | None = None
    """Draft tokens of a sequence, if the policy has this setting; None: as many as the proposer drafts."""


@runtime_checkable
class KnownLengths(Protocol):
    """A draft-length policy that knows which numbers it may decide, so that an engine prepares for them."""

    def lengths(self, most: int) -> tuple[int, ...]:
        """Returns the numbers that it may decide for all sequences of a step, ascending.

        most: DraftView.max_draft_tokens, which no number exceeds.
        """
        ...
