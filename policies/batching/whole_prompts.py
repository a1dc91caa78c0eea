"""Iterations of whole prompts: together with decodes (Orca), or before them (vLLM v0)."""

from __future__ import annotations

from dataclasses import dataclass

from fieldlimits import Checked, PositiveInt
from policies.core.plan import FOREVER
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class Orca(Checked):
    """Whole prompts share iterations with decodes.

    Iteration-level scheduling with selective batching (Orca: Yu et al., OSDI 2022, section 3 and algorithm
    1).

    After every iteration finished requests leave, and waiting requests join in order until batch_size
    requests run. A whole prompt is computed in the iteration that admits it, together with the decodes of the
    others: all operators except attention process the tokens of all requests as one batch. There is no token
    budget, so a long prompt delays the next token of all requests by its whole prefill time. Memory pressure:
    the paper reserves KV for a request's longest possible output before it is admitted. With a caching policy
    that does so (caching=contiguous) no sequence is ever preempted. With paged KV the sequence of largest
    rank is preempted and recomputed later.
    Horizon: the plan repeats until a sequence ends or a request arrives, because slots and memory become free
    only when a sequence ends.
    """

    batch_size: PositiveInt = 32
    """Maximum number of requests in an iteration."""

    @property
    def max_unasked_decodes(self) -> int:
        """No limit, because there is no token budget."""
        return FOREVER

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Decodes running sequences, then admits whole prompts until the batch is full."""
        step.decode_all()
        for seq in view.prefilling:  # a part of its KV was loaded from another tier
            step.prefill(seq, FOREVER)
        for seq in view.waiting:
            if view.num_running >= self.batch_size or not step.admit(seq, FOREVER):
                break
        step.repeat()


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillFirst(Checked):
    """Whole prompts before decodes.

    Continuous batching with separate iterations for prefill and decode, prefill first.

    This is the default of vLLM v0 (Kwon et al., SOSP 2023), and the basis of SGLang's (`sglang.py`): as soon
    as waiting prompts fit, an iteration computes only whole prompts, up to the token budget; otherwise it
    decodes. TTFT is short, but prefills stall the decodes. Only a prompt longer than the budget is split,
    over several prefill iterations.
    Memory pressure: when a decode finds no free block, the sequence of largest rank is preempted and
    recomputed later.
    Horizon: the plan repeats until something changes. A prompt that does not fit now does not fit until a
    sequence ends, and a prompt that used up the budget does so again.
    """

    max_num_batched_tokens: PositiveInt = 8192
    """Maximum number of tokens in one iteration."""

    @property
    def max_unasked_decodes(self) -> int:
        """Number of decodes within the budget."""
        return self.max_num_batched_tokens

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Computes the prompts that fit, or decodes if there are none."""
        step.budget(self.max_num_batched_tokens)
        for seq in view.prefilling:
            step.prefill(seq, step.tokens_left)
        for seq in view.waiting:
            splits = seq.num_uncomputed > step.tokens_left
            if (splits and step.num_tokens) or not step.admit(seq, step.tokens_left):
                break
        if not step.num_tokens:
            step.decode_all()
        step.repeat()
