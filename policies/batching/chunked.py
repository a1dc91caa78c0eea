"""Continuous batching with chunked prefill: one token budget for decodes and prompt chunks.

What vLLM v1 does by default, after Sarathi-Serve's stall-free batching (Agrawal et al., OSDI 2024): running
sequences first, then waiting ones in order, each prompt cut to what the budget leaves.
Memory pressure: the sequence of largest rank loses its KV and is recomputed later; a step that preempted
admits nobody. A request is admitted only if its whole prompt can get blocks.
Horizon: until something changes. Decodes stay, a prompt that ate the budget eats the same again, and who
could not be admitted now (no slot, no block, no budget) cannot be until a sequence ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.step import StepBuilder, StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunked:
    """Decodes, running prefills, then admissions, out of one budget."""

    max_num_batched_tokens: int = 8192
    """Tokens in one iteration."""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens={self.max_num_batched_tokens}: must be >= 1")

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Spend the budget on decodes, then on begun prompts, then on new ones."""
        step.budget(self.max_num_batched_tokens)
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, step.tokens_left)
        for seq in view.waiting:
            if not step.admit(seq, step.tokens_left):
                break
        step.repeat()
