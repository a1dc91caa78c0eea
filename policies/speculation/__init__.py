"""Speculative decoding: proposers draft tokens, draft-length policies decide how many; trees of tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from policies.core.sequence import SequenceView

MAX_CANDIDATES = 20_000
"""Most nodes that a beam proposes."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The draft tokens of one pass as nodes of a tree.

    parents: for each node, the number of the node that it continues; -1: the newest token of the sequence.
    Nodes are listed by depth, and the children of a node by their probability, the largest first.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False)
    """Depth of each node, from 1: its place in the pass."""
    ranks: tuple[int, ...] = field(init=False)
    """Rank of each node among the children of its parent, from 0."""

    def __post_init__(self) -> None:
        if not self.parents:
            raise ValueError("tree=[]: must have at least one node")
        depths: list[int] = []
        ranks: list[int] = []
        num_children = [0] * (len(self.parents) + 1)
        for node, parent in enumerate(self.parents):
            if not isinstance(parent, int) or not -1 <= parent < node:
                raise ValueError(
                    f"node {node} continues node {parent}, so it is no tree; "
                    "the parent of a node must be -1 (the newest token) or a node before it"
                )
            depth = 1 if parent < 0 else depths[parent] + 1
            if depths and depth < depths[-1]:
                raise ValueError(
                    f"node {node} has depth {depth} and follows a node of depth {depths[-1]}; "
                    "list the nodes by depth"
                )
            depths.append(depth)
            ranks.append(num_children[parent + 1])
            num_children[parent + 1] += 1
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "ranks", tuple(ranks))

    @property
    def num_nodes(self) -> int:
        """Number of draft tokens."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Maximum number of draft tokens that a pass can accept."""
        return self.depths[-1]

    def num_nodes_to(self, depth: int) -> int:
        """Counts the nodes of the first `depth` levels."""
        return sum(each <= depth for each in self.depths)

    def children(self, node: int) -> list[int]:
        """Returns the nodes that continue a node, by rank; -1: the nodes that continue the newest token."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    @classmethod
    def of_paths(cls, paths: list[list[int]]) -> TokenTree:
        """Returns the tree of Medusa's choices, each of them a path of ranks such as [0, 2, 1]."""
        ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        numbers = {path: number for number, path in enumerate(ordered)}
        parents = []
        for path in ordered:
            wrong = next((rank for rank in path if not isinstance(rank, int) or rank < 0), None)
            if wrong is not None:
                raise ValueError(f"path {list(path)} has rank {wrong}; ranks are whole numbers >= 0")
            if not path:
                raise ValueError("an empty path names no node; a path has at least one rank")
            if path[:-1] and path[:-1] not in numbers:
                raise ValueError(f"path {list(path)} continues {list(path[:-1])}, which is no path")
            sibling = (*path[:-1], path[-1] - 1)
            if path[-1] and sibling not in numbers:
                raise ValueError(f"path {list(path)} has rank {path[-1]}, and {list(sibling)} is no path")
            parents.append(numbers[path[:-1]] if path[:-1] else -1)
        return cls(tuple(parents))

    @classmethod
    def of_widths(cls, widths: list[int]) -> TokenTree:
        """Returns the tree in which every node of a level has widths[level] children."""
        parents: list[int] = []
        level = [-1]
        for width in widths:
            if width < 1:
                raise ValueError(f"widths={widths}: must be >= 1")
            first = len(parents)
            parents += [node for node in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents))

    @classmethod
    def of_beam(
        cls, width: int, depth: int, num_nodes: int, rate: float = 0.75, rank_decay: float = 0.32
    ) -> TokenTree:
        """Returns the tree of EAGLE-2 (Li et al., EMNLP 2024) and SGLang, for a draft of mean confidence.

        The draft proposes `width` children of the newest token, then at each further level `width` children
        of the `width` most likely nodes of the previous level. The num_nodes most likely nodes are verified.
        The likelihood of a node is the product of the rates of its path: `rate` for a first child, multiplied
        by rank_decay for every further child after the previous ones were rejected. A real draft model
        chooses by its confidence, so its tree differs in every pass.
        """
        for name, value in (("width", width), ("depth", depth), ("num_nodes", num_nodes)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be >= 1")
        for name, share in (("rate", rate), ("rank_decay", rank_decay)):
            if not 0 < share <= 1:
                raise ValueError(f"{name}={share}: must be > 0 and <= 1")
        candidates = width + (depth - 1) * width**2
        if candidates > MAX_CANDIDATES:
            raise ValueError(
                f"width={width}, depth={depth}: propose {candidates:,} nodes; must be at most "
                f"{MAX_CANDIDATES:,}: width + (depth - 1) x width x width"
            )
        by_rank, missed = [], 1.0
        for rank in range(width):
            share = rate * rank_decay if rank else rate
            by_rank.append(missed * share)
            missed *= 1 - share
        level = [(share, [rank]) for rank, share in enumerate(by_rank)]
        nodes = level
        for _ in range(1, depth):
            level = [
                (likelihood * share, [*path, rank])
                for likelihood, path in _likeliest(level, width)
                for rank, share in enumerate(by_rank)
            ]
            nodes = nodes + level
        return cls.of_paths([path for _, path in _likeliest(nodes, num_nodes)])


def _likeliest(nodes: list[tuple[float, list[int]]], num: int) -> list[tuple[float, list[int]]]:
    """Returns the num most likely nodes; ties go to shorter paths, then to the first node."""
    return sorted(nodes, key=lambda node: (-node[0], len(node[1]), node[1]))[:num]


Ints = NDArray[np.int64]
"""One integer per sequence."""

PassSeconds = Callable[[int, int, int], float]
"""Estimates the seconds of a pass from (sequences, their KV tokens in total, draft tokens of each)."""


@dataclass(slots=True)
class AcceptanceCounts:
    """Draft tokens so far by place in their pass (index 0: the first draft token of a pass).

    Only passes with read tokens count: with asynchronous scheduling, passes of the last step do not.
    """

    drafted: NDArray[np.int64]
    """Number of passes that verified a draft token at each place; with a tree, passes with nodes at a depth.
    """
    accepted: NDArray[np.int64]
    """Number of passes that accepted a draft token at each place, and therefore at all earlier places."""
    num_passes: int = 0
    """Number of passes with at least one draft token."""

    @classmethod
    def zero(cls, max_draft_tokens: int) -> AcceptanceCounts:
        """Returns counts of nothing."""
        return cls(np.zeros(max_draft_tokens, np.int64), np.zeros(max_draft_tokens, np.int64))

    def reached(self) -> NDArray[np.float64]:
        """Estimates the number of passes that accepted all earlier places and drafted a token at each place.

        It is exact if all passes drafted the same number of tokens, and unbiased if the number does not
        depend on the sequence.
        """
        drafted_too = self.drafted[1:] / np.maximum(self.drafted[:-1], 1)
        return np.concatenate((self.drafted[:1], self.accepted[:-1] * drafted_too))

    def rates(self, prior: float, weight: float = 1.0) -> NDArray[np.float64]:
        """Computes the probability per place that a draft token is accepted if all earlier ones are.

        prior, weight: a rate assumed before the first draft, and the number of drafts that it counts as.
        """
        return np.minimum((self.accepted + prior * weight) / (self.reached() + weight), 1.0)


@dataclass(slots=True)
class DraftView:
    """A policy's view of the engine when it decides on the next pass of this step's sequences."""

    max_draft_tokens: int
    """Maximum number of draft tokens of a sequence; the depth of the tree, if the proposer has one."""
    acceptance: AcceptanceCounts
    """Acceptance of all sequences of the engine."""
    num_blocks: int
    """Total number of KV blocks."""
    estimate: PassSeconds | None = None
    """The estimate of `pass_seconds`; None: no estimate."""
    tpot_s: float | None = None
    """Time per output token that the SLO allows, s; None: no SLO."""
    now: float = 0.0
    """Time at which the step is planned, s."""
    num_iterations: int = 0
    """Iterations that the engine has computed."""
    num_requests: int = 0
    """Number of sequences with tokens in this step, including prompt chunks."""
    num_waiting: int = 0
    """Sequences in the waiting queue."""
    num_free_blocks: int = 0
    """Free KV blocks after the reservations of this step."""
    tokens_left: int = 0
    """Tokens of the step's budget that are not used; 2**62 if the batching policy has set no budget."""
    num_context_tokens: int = 0
    """KV tokens of the sequences in `sequences`, summed."""
    sequences: SequenceOf[SequenceView] = ()
    """Sequences that get a token in this step: decodes in the order of admission, then completed prompts."""
    num_passes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Per sequence: passes with draft tokens so far."""
    num_drafted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Per sequence: draft tokens so far."""
    num_accepted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Per sequence: accepted draft tokens so far."""
    num_misses: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Per sequence: number of consecutive latest passes without an accepted draft token."""
    num_output_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Per sequence: output tokens that have been read."""
    first_token_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0, np.float64))
    """Per sequence: time of its first output token, s; NaN: it has none."""

    def pass_seconds(self, num_draft_tokens: int) -> float:
        """Estimates the seconds of the next step if every sequence has this many draft tokens.

        Raises ValueError if the engine has no estimate; a policy declares with `needs_cost` that it needs
        one.
        """
        if self.estimate is None:
            raise ValueError("pass_seconds: the policy must declare needs_cost = True to get an estimate")
        return self.estimate(len(self.sequences), self.num_context_tokens, num_draft_tokens)


class SlotRules(NamedTuple):
    """The rules of a proposer for KV slots and budgets, as in vLLM 0.32."""

    keeps_lookahead: bool = False
    """Whether KV slots for num_speculative_tokens additional tokens are reserved after each sequence."""
    num_input_slots: int = 0
    """Additional tokens that each request takes from max_num_batched_tokens."""
    drops_last_block: bool = False
    """Whether the last block of a prefix-cache hit is computed again."""
    prefill_lookahead: int = 0
    """A chunk of a prompt ends at the prompt's last token or at least this many tokens before it."""
    overlaps: bool = True
    """Whether it supports asynchronous scheduling; if not, the engine schedules synchronously."""


class Proposer(Protocol):
    """A proposer drafts tokens: a frozen dataclass of settings. The real engine implements its method."""

    method: ClassVar[str]
    """The name of the method in vLLM's --speculative-config."""

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum number of draft tokens of a sequence in one pass; the nodes of its tree, if it has one."""
        ...

    @property
    def tree(self) -> TokenTree | None:
        """The tree of the draft tokens; None: each continues the previous one."""
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
    """Decides the number of draft tokens. Each engine has a deep copy, so a policy may have state."""

    needs_cost: ClassVar[bool]
    """Whether it calls `DraftView.pass_seconds`; without an estimate the engine rejects such a policy."""
    reads_sequences: ClassVar[bool]
    """Whether it reads the arrays of `DraftView` with one number per sequence."""

    @property
    def num_repeats(self) -> int:
        """Number of steps, including the one just decided, with certainly the same decision.

        It may assume that the same number of sequences gets a token in each of them. 1: no promise.
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
    """Optional members of a draft-length policy, in addition to its protocol."""

    needs_tpot: bool = False
    """Whether the run must have an SLO with a TPOT."""
    num_tokens: int | None = None
    """Draft tokens per sequence, if the policy has this setting; None: the proposer's number."""


@runtime_checkable
class KnownLengths(Protocol):
    """A draft-length policy that lists its possible numbers, so that an engine can prepare for them."""

    def lengths(self, most: int) -> tuple[int, ...]:
        """Returns the numbers that it may choose for all sequences of a step, ascending.

        most: DraftView.max_draft_tokens, the upper bound.
        """
        ...
