"""Continuous batching with chunked prefill: one token budget for decodes and prompt chunks.

This is the default of vLLM v1, after Sarathi-Serve's stall-free batching (Agrawal et al., OSDI 2024): running
sequences first, then waiting ones in order; each prompt is cut to what the budget leaves. Sarathi-Serve
itself is this policy with a small budget: batching=sarathi.
With long_prefill_token_threshold several prompts are under way at once, and running sequences are served in
the order of their admission, decodes and prompts mixed, as vLLM 0.32 does. Without it, the only prompt under
way is the last running sequence. vLLM v0's max_num_partial_prefills, which v1 accepts at its default only, is
a policy of its own: batching=partial_prefills.
Memory pressure: the sequence of largest rank loses its KV and is recomputed later; a step that preempted
admits no sequence. A request is admitted only if its whole prompt can get blocks.
Horizon: until something changes. Decodes stay, a prompt that used up the budget does so again, and a sequence
that could not be admitted (no slot, no block, no budget) cannot be admitted until a sequence ends. One
exception: a prompt that is limited by the threshold leaves budget, and other prompts may then find in a
prefix cache what it computes, so that they fit. While a sequence waits for blocks beside such a prompt, every
iteration is decided anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.core.plan import FOREVER
from policies.core.sequence import DECODING, PREFILLING
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunked:
    """One token budget for the running sequences first, then for admissions."""

    max_num_batched_tokens: int = 8192
    """Maximum number of tokens in one iteration."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be cut to fit the budget.

    If not, only prompts that exceed the whole budget are cut.
    """
    long_prefill_token_threshold: int = 0
    """Maximum tokens of one prompt in one iteration, unless its request is the only one; 0: no such limit."""
    long_prefill_token_threshold_adaptive: bool = False
    """Raises the threshold to an equal share of the budget.

    Max_num_batched_tokens / requests in the engine.
    """

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens={self.max_num_batched_tokens}: must be >= 1")
        threshold = self.long_prefill_token_threshold
        if threshold < 0:
            raise ValueError(f"long_prefill_token_threshold={threshold}: must be >= 0")
        if self.long_prefill_token_threshold_adaptive and not threshold:
            raise ValueError(
                "long_prefill_token_threshold_adaptive=true with long_prefill_token_threshold=0: there is no "
                "limit to adapt; set long_prefill_token_threshold >= 1"
            )

    @property
    def max_unasked_decodes(self) -> int:
        """Number of decodes that the budget allows."""
        return self.max_num_batched_tokens

    @property
    def fills_in_order(self) -> bool:
        """Whether prompts are limited by the budget only."""
        return not self.long_prefill_token_threshold

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Spends the budget on running sequences, then on new ones."""
        step.budget(self.max_num_batched_tokens)
        max_chunk = self._max_chunk(view) if self.long_prefill_token_threshold else FOREVER
        self._serve_running(view, step, max_chunk)
        for seq in view.waiting:
            may_cut = self.enable_chunked_prefill or seq.num_uncomputed > self.max_num_batched_tokens
            if not step.admit(seq, max_chunk, may_cut=may_cut):
                break
        if max_chunk == FOREVER or not self._may_admit_later(view, step):
            step.repeat()

    def _max_chunk(self, view: StepView) -> int:
        """Maximum tokens of one prompt in this iteration."""
        num_requests = view.num_running + view.num_waiting
        if num_requests < 2:
            return FOREVER
        if self.long_prefill_token_threshold_adaptive:
            return max(self.long_prefill_token_threshold, self.max_num_batched_tokens // num_requests)
        return self.long_prefill_token_threshold

    def _serve_running(self, view: StepView, step: StepBuilder, max_chunk: int) -> None:
        """Serves running sequences by admission, until the budget is spent or one preempted itself."""
        in_order = self.long_prefill_token_threshold and view.prefilling
        if not in_order and not step.decode_all():
            return
        for seq in view.running if in_order else view.prefilling:
            if seq.state is DECODING:
                served = step.decode(seq)
            elif seq.state is PREFILLING:
                served = step.prefill(seq, max_chunk)
            else:
                continue  # preempted in this step, or paused, or waiting for KV
            if not served:
                return

    @staticmethod
    def _may_admit_later(view: StepView, step: StepBuilder) -> bool:
        """Whether a sequence waits for blocks while a prompt is under way that leaves budget."""
        has_room = view.num_running < view.max_num_seqs and step.tokens_left > 0
        return bool(view.num_waiting and view.prefilling) and has_room
