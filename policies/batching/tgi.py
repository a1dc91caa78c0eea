"""Continuous batching as in Text Generation Inference's router (TGI 2 and 3, backends/v3).

Iterations of whole prompts alternate with decode iterations. Waiting requests join the running batch only if
- at least waiting_served_ratio times the number of running requests can join at once, which justifies an
interruption of the decodes, or
- max_waiting_tokens iterations have passed since the last prefill.
The joining prompts have at most max_batch_prefill_tokens tokens in total. After a prefill that interrupted
decodes, at least one decode iteration follows; requests may join the first batch of an idle engine at once.
The router refuses prompts above max_batch_prefill_tokens; here such a prompt is split, as in prefill_first.
Memory pressure: the router reserves KV for the prompt and the longest possible output of every request, up to
max_batch_total_tokens in the batch, and never preempts. Without that limit KV is allocated as it grows, and
the sequence of largest rank is preempted and recomputed later.
Horizon: the plan repeats until max_waiting_tokens lets requests join, or until something changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from fieldlimits import Checked, NonNegative, NonNegativeInt, PositiveInt, check
from policies.core.plan import FOREVER
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class Tgi(Checked):
    """Prompts interrupt decodes when there are enough of them, or when they have waited long enough."""

    waiting_served_ratio: NonNegative = 0.3
    """Minimum number of requests that join at once, divided by the number of running requests."""
    max_waiting_tokens: NonNegativeInt = 20
    """Number of iterations without a prefill after which any number of requests may join."""
    max_batch_prefill_tokens: PositiveInt = 4096
    """Maximum number of prompt tokens in one iteration."""
    max_batch_total_tokens: int | None = None
    """Maximum tokens of the running requests, with longest possible outputs; None: nothing is reserved."""
    _last_prefill: dict[str, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    """iteration: the iteration of the last prefill; joined: whether its requests joined a running batch."""

    def __post_init__(self) -> None:
        check(self)
        total = self.max_batch_total_tokens
        if total is not None and total < self.max_batch_prefill_tokens:
            raise ValueError(
                f"max_batch_total_tokens={total}: must be >= max_batch_prefill_tokens="
                f"{self.max_batch_prefill_tokens}, or null"
            )

    @property
    def max_unasked_decodes(self) -> int:
        """No limit, because decodes have no token budget."""
        return FOREVER

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Computes prompts if they may join now, else decodes."""
        num_iterations = self._iterations_until_any_may_join(view)
        if view.prefilling:
            step.budget(self.max_batch_prefill_tokens)
            for seq in view.prefilling:
                step.prefill(seq, step.tokens_left)
        elif view.num_waiting and (num_iterations == 0 or self._enough_can_join(view)):
            step.budget(self.max_batch_prefill_tokens)
            self._admit(view, step)
            num_iterations = 0
        if step.num_tokens:
            self._last_prefill.update(iteration=view.num_iterations, joined=view.num_decoding > 0)
            return
        step.budget(FOREVER)
        step.decode_all()
        step.repeat(num_iterations if view.num_waiting and num_iterations else FOREVER)

    def _iterations_until_any_may_join(self, view: StepView) -> int:
        """Returns the number of iterations, including this one, in which only large groups may join."""
        if not view.num_decoding:
            return 0
        since = view.num_iterations - self._last_prefill.get("iteration", view.num_iterations)
        if since == 1 and self._last_prefill["joined"]:
            return 1
        return max(0, self.max_waiting_tokens - since)

    def _enough_can_join(self, view: StepView) -> bool:
        """Returns whether a large enough group fits into the budget and the reservations."""
        since = view.num_iterations - self._last_prefill.get("iteration", view.num_iterations)
        if since == 1 and self._last_prefill["joined"]:
            return False
        min_size = int(view.num_decoding * self.waiting_served_ratio)
        size, prefill_tokens, total_tokens = 0, 0, self._num_reserved(view)
        for seq in view.waiting if min_size else ():
            prefill_tokens += seq.num_uncomputed
            total_tokens += seq.max_num_tokens
            over_budget = size > 0 and prefill_tokens > self.max_batch_prefill_tokens
            if over_budget or total_tokens > self._max_total:
                break
            size += 1
            if size == min_size:
                break
        return size >= min_size

    def _admit(self, view: StepView, step: StepBuilder) -> None:
        total_tokens = self._num_reserved(view)
        for seq in view.waiting:
            total_tokens += seq.max_num_tokens
            splits = seq.num_uncomputed > step.tokens_left
            over_total = total_tokens > self._max_total and view.num_running
            if (splits and step.num_tokens) or over_total or not step.admit(seq, step.tokens_left):
                break

    @property
    def _max_total(self) -> float:
        return inf if self.max_batch_total_tokens is None else self.max_batch_total_tokens

    def _num_reserved(self, view: StepView) -> int:
        """Returns the maximum total length of the running requests in tokens; 0 if nothing is reserved."""
        if self.max_batch_total_tokens is None:
            return 0
        return sum(seq.max_num_tokens for seq in view.running)
