"""Continuous batching with separate iterations for prefill and decode, prefill first.

This is the default of vLLM v0 (Kwon et al., SOSP 2023), and the basis of SGLang's (`sglang.py`): as soon as
waiting prompts fit, an iteration computes whole prompts only, up to the token budget; otherwise it decodes.
TTFT is short, but prefills stall the decodes.
Only a prompt longer than the budget is split, over several prefill iterations.
Memory pressure: when a decode finds no free block, the sequence of largest rank is preempted and recomputed
later.
Horizon: the plan repeats until something changes. A prompt that does not fit now does not fit until a
sequence ends, and a prompt that used up the budget does so again.
"""

from __future__ import annotations

from dataclasses import dataclass

from fieldlimits import Checked, PositiveInt
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillFirst(Checked):
    """Whole prompts before decodes."""

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
