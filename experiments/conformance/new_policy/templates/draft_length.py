"""Draft-length policy: decides how many tokens are drafted. Describe it here; name the paper.

It sees, in every step (policies.speculation.DraftView): how often draft tokens were accepted so far, by
their place in the pass; the requests of the step and those that wait; free KV blocks and what is left of the
token budget; the TPOT of the SLO; the sequences that get a token in the step; with reads_sequences = True, of
each of them its passes, draft tokens, accepted ones, failed passes in a row, output tokens, and the time of
its first token; with needs_cost = True, an estimate of the time of a pass, view.pass_seconds(k).
It never sees output lengths, nor which draft tokens will be accepted.
It may: return one number for all sequences, or an array with one number per sequence; remember.
It must promise: whole numbers from 0 to view.max_draft_tokens; num_repeats that it keeps; equal decisions in
equal states: no random numbers, no clock other than view.now.

Memory pressure: none. Horizon: num_repeats steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fieldlimits import Checked, PositiveInt
from policies.speculation import DraftView, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPolicy(Checked):
    """Drafts, for each sequence, one token more than were accepted of its drafts on average."""

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = True

    # Settings are the fields, with their defaults. State of the policy is a field with init=False.
    min_passes: PositiveInt = 4
    """Passes with drafts before which a sequence drafts as many tokens as it can."""

    @property
    def num_repeats(self) -> int:
        """Returns 1: each pass may change the averages."""
        return 1

    def num_draft_tokens(self, view: DraftView) -> Ints:
        """Returns the number of draft tokens of each sequence."""
        average = view.num_accepted // view.num_passes.clip(min=1)
        lengths: Ints = (average + 1).clip(max=view.max_draft_tokens)
        lengths[view.num_passes < self.min_passes] = view.max_draft_tokens
        return lengths
