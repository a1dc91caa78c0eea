"""No batching: one request at a time, in the order of the queue.

A model behind a plain web server works like this; it is a baseline for other policies. The prompt is
computed, in chunks if it exceeds the token budget, then one token per iteration.
Memory pressure: none, as a single sequence always fits.
Horizon: the plan repeats until the request ends; arrivals change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from fieldlimits import Checked, PositiveInt
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class OneAtATime(Checked):
    """Starts the next request when the last one has ended."""

    max_num_batched_tokens: PositiveInt = 8192
    """Maximum number of tokens in one iteration, and thus in one chunk of a prompt."""

    @property
    def max_unasked_decodes(self) -> int:
        """Number of decodes within the budget."""
        return self.max_num_batched_tokens

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Continues the running request, else begins the next one."""
        step.budget(self.max_num_batched_tokens)
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, step.tokens_left)
        for seq in () if view.num_running else view.waiting:
            step.admit(seq, step.tokens_left)
            break
        step.repeat()
