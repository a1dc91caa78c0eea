"""Continuous batching that keeps prefill and decode apart and lets prefill go first.

vLLM v0 (Kwon et al., SOSP 2023) and SGLang's default: as soon as waiting prompts fit, an iteration of whole
prompts only, up to the token budget; else one of decodes only. Good TTFT, but decodes stall behind prompts.
A prompt longer than the budget makes an iteration of its own.
Memory pressure: while decoding, the sequence of largest rank loses its KV and is recomputed later.
Horizon: a decode iteration repeats until something changes: who did not fit now will not fit until a
sequence ends. A prefill iteration does not repeat.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.step import StepBuilder, StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillFirst:
    """Whole prompts before decodes."""

    max_num_batched_tokens: int = 8192
    """Prompt tokens in one prefill iteration."""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens={self.max_num_batched_tokens}: must be >= 1")

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Admit whole prompts while they fit; if none did, decode."""
        for seq in view.waiting:
            full = step.num_tokens + seq.num_uncomputed > self.max_num_batched_tokens
            if (full and step.num_tokens) or not step.admit(seq, seq.num_uncomputed):
                break
        if not step.num_tokens:
            step.decode_all()
            step.repeat()
