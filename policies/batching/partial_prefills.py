"""Chunked prefill that splits the budget between several prompts, and lets short ones overtake long ones.

This is vLLM v0 with chunked prefill and concurrent partial prefills (0.8 to 0.10; v1 accepts these settings
only at their defaults, and 0.32 has removed them). Decodes come first. Every prompt, in prefill or new, then
gets at most an equal share of the budget: max_num_batched_tokens / (prompts in prefill and waiting, at most
max_num_partial_prefills). A prompt with more than long_prefill_token_threshold remaining tokens is long.
While max_long_partial_prefills long prompts are in prefill, waiting long ones are skipped. With
max_num_partial_prefills=1 this is plain chunked prefill: a prompt may get the complete budget, and no prompt
is skipped. Starvation: a long prompt waits until the long prompts before it have been computed; any number of
short ones may overtake it.
Memory pressure: as for chunked.
Horizon: while no prompt is in prefill the plan repeats until something changes; else it holds for one
iteration, because shares and the number of long prompts change from one iteration to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from fieldlimits import Checked, NonNegativeInt, PositiveInt, check
from policies.core.sequence import SequenceState, SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialPrefills(Checked):
    """Decodes first, then shares of the budget for prompts in prefill and new ones."""

    max_num_batched_tokens: PositiveInt = 2048
    """Maximum number of tokens in one iteration."""
    max_num_partial_prefills: PositiveInt = 4
    """Maximum number of shares into which the budget is split. vLLM's default: 1."""
    max_long_partial_prefills: PositiveInt = 1
    """Maximum number of long prompts in prefill; other long prompts wait, and shorter ones overtake them."""
    long_prefill_token_threshold: NonNegativeInt = 1310
    """Remaining tokens above which a prompt is long. vLLM's default is 4 % of max_model_len (here 32,768)."""

    def __post_init__(self) -> None:
        check(self)
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ValueError(
                f"max_long_partial_prefills={self.max_long_partial_prefills}: must be <= "
                f"max_num_partial_prefills={self.max_num_partial_prefills}"
            )

    @property
    def max_unasked_decodes(self) -> int:
        """Number of decodes within the budget."""
        return self.max_num_batched_tokens

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Serves running sequences, then admits new ones, up to the maximum number of long prompts."""
        step.budget(self.max_num_batched_tokens)
        num_long = sum(map(self._is_long, view.prefilling))
        share = max(1, self.max_num_batched_tokens // self._num_shares(view, num_long))
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, share)
        for seq in view.waiting:
            is_long = self._is_long(seq)
            if is_long and num_long >= self.max_long_partial_prefills and self.max_num_partial_prefills > 1:
                continue
            if not step.admit(seq, share):
                break
            if seq.state is SequenceState.prefilling:  # else its KV is being loaded
                num_long += is_long
        if not view.prefilling:
            step.repeat()

    def _is_long(self, seq: SequenceView) -> bool:
        return seq.num_uncomputed > self.long_prefill_token_threshold

    def _num_shares(self, view: StepView, num_long: int) -> int:
        """Returns the number of prompts that could share this iteration, 1 to max_num_partial_prefills."""
        num_prefills = len(view.prefilling)
        for seq in view.waiting if num_prefills < self.max_num_partial_prefills else ():
            if self._is_long(seq):
                if num_long >= self.max_long_partial_prefills:
                    continue
                num_long += 1
            num_prefills += 1
            if num_prefills >= self.max_num_partial_prefills:
                break
        return min(max(num_prefills, 1), self.max_num_partial_prefills)
