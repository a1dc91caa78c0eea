"""The state of an engine that draft-length policies may read."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from policies.core.sequence import SequenceView

Ints = NDArray[np.int64]
"""One whole number for each sequence."""

PassSeconds = Callable[[int, int, int], float]
"""Estimates the seconds of a pass of (sequences, KV tokens of all of them, draft tokens of each)."""


@dataclass(slots=True)
class AcceptanceCounts:
    """Draft tokens so far by place in their pass (index 0: the first draft token of a pass).

    Only passes of which the tokens have been read count: with asynchronous scheduling, those of the last step
    do not.
    """

    drafted: NDArray[np.int64]
    """Passes that verified a draft token at a place; with a tree, passes with nodes at a depth."""
    accepted: NDArray[np.int64]
    """Passes that accepted a draft token at a place; then all places before it were accepted, too."""
    num_passes: int = 0
    """Number of passes with at least one draft token."""

    @classmethod
    def zero(cls, max_draft_tokens: int) -> AcceptanceCounts:
        """Returns counts of nothing."""
        return cls(np.zeros(max_draft_tokens, np.int64), np.zeros(max_draft_tokens, np.int64))

    def reached(self) -> NDArray[np.float64]:
        """Estimates in how many passes all places before a place were accepted and a token was drafted there.

        It is exact if all passes drafted the same number of tokens, and unbiased if the number does not
        depend on the sequence.
        """
        drafted_too = self.drafted[1:] / np.maximum(self.drafted[:-1], 1)
        return np.concatenate((self.drafted[:1], self.accepted[:-1] * drafted_too))

    def rates(self, prior: float, weight: float = 1.0) -> NDArray[np.float64]:
        """Computes the probability by place that a draft token is accepted if those before it are.

        prior, weight: a rate that is assumed before the first draft, and the number of drafts that it counts
        as.
        """
        return np.minimum((self.accepted + prior * weight) / (self.reached() + weight), 1.0)


@dataclass(slots=True)
class DraftView:
    """Shows a policy the engine when it decides on the next pass of the sequences of this step."""

    max_draft_tokens: int
    """Maximum number of draft tokens of a sequence; the depth of the tree, if the proposer has one."""
    acceptance: AcceptanceCounts
    """Acceptance of all sequences of the engine."""
    num_blocks: int
    """Total number of KV blocks."""
    estimate: PassSeconds | None = None
    """The estimate of `pass_seconds`; None: there is none."""
    tpot_s: float | None = None
    """Time per output token that the SLO allows, s; None: no SLO."""
    now: float = 0.0
    """Time at which the step is planned, s."""
    num_iterations: int = 0
    """Iterations that the engine has computed."""
    num_requests: int = 0
    """Sequences with tokens in this step, prompt chunks included."""
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
    """Per sequence: its last passes with draft tokens of which none was accepted, in a row."""
    num_output_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Per sequence: output tokens that have been read."""
    first_token_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0, np.float64))
    """Per sequence: time of its first output token, s; NaN: it has none."""

    def pass_seconds(self, num_draft_tokens: int) -> float:
        """Estimates the seconds of the next step if every sequence has so many draft tokens.

        Raises ValueError if the engine has no estimate, which a policy declares to need by `needs_cost`.
        """
        if self.estimate is None:
            raise ValueError("pass_seconds: the policy must declare needs_cost = True to get an estimate")
        return self.estimate(len(self.sequences), self.num_context_tokens, num_draft_tokens)
