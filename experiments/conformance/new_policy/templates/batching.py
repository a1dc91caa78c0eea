"""Batching policy: decides which tokens are computed in the next iteration. Describe it here; name the paper.

It sees, through `view`: the sequences that decode, are in prefill, and wait (in the order of the scheduling
policy), and the free KV blocks and slots; of each sequence, the known and the computed tokens, and its
request. It never sees output lengths. `now` is the only clock.
It may call the methods of `step`: budget, decode_all, decode, prefill, admit, preempt, pause, resume, hold,
wait_until, repeat. A refused call changes nothing and returns False. Blocks and budget are checked there, so
that no policy can leak a block.
It must promise: to schedule something whenever anything can run, or else to call wait_until; equal states
give equal decisions; and, if it calls repeat(), that only an event from outside would change this step.
State below what happens under memory pressure, and how long a decision holds (its horizon).

Memory pressure: decode_all preempts the sequence of largest rank until the others fit; it is recomputed
later.
Horizon: until something changes. A sequence that cannot be admitted now cannot be until another ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from fieldlimits import Checked, PositiveInt
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPolicy(Checked):
    """Decodes first, then prompts in the order of the queue, until the budget is used."""

    # Settings are the fields, with their defaults. State of the policy is a field, too:
    # field(init=False, default_factory=dict, repr=False, compare=False). Each replica has its own deep copy.
    max_num_batched_tokens: PositiveInt = 2048
    """Maximum number of tokens in one iteration."""

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Decides which tokens the next iteration computes."""
        step.budget(self.max_num_batched_tokens)
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, step.tokens_left)
        for seq in view.waiting:
            if not step.admit(seq, step.tokens_left):
                break  # no later request overtakes one for which there is no room
        step.repeat()  # omit it if it does not hold: the simulation is only slower without it
