"""A batching policy: which tokens share the next iteration. Say here what it does, and after which paper.

It sees, through `view`: who decodes, who is in prefill, who waits (in the order of the scheduling policy),
free KV blocks and slots; of each sequence, the tokens known and computed, and its request. It never sees
how long an answer will be. `now` is the only clock.
It may call the verbs of `step`: budget, decode_all, decode, prefill, admit, preempt, pause, resume, hold,
wait_until, repeat. A verb that is refused changes nothing and says so by returning False; blocks and budget
are checked there, so that no policy can leak a block.
It must promise: to schedule something whenever anything can run, or else to call wait_until; to decide the
same when asked the same; and, if it calls repeat(), that only an event from outside would change this step.
Say below what happens under memory pressure, and for how long a decision stands (its horizon).

Memory pressure: decode_all preempts the sequence of largest rank until the others fit; it is recomputed
later.
Horizon: until something changes. Who cannot be admitted now cannot be until a sequence ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPolicy:
    """Decodes first, then prompts in the order of the queue, until the budget is spent."""

    # Settings are the fields, with their defaults. What a policy remembers is a field, too:
    # field(init=False, default_factory=dict, repr=False, compare=False). Each replica gets a deep copy.
    max_num_batched_tokens: int = 2048
    """Tokens in one iteration."""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens={self.max_num_batched_tokens}: must be >= 1")

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Decide what the next iteration computes."""
        step.budget(self.max_num_batched_tokens)
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, step.tokens_left)
        for seq in view.waiting:
            if not step.admit(seq, step.tokens_left):
                break  # no request overtakes one that finds no room
        step.repeat()  # leave it out where it does not hold: the run is then only slower
