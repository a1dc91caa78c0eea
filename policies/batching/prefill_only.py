"""Prefill worker of a disaggregated deployment (Splitwise, ISCA 2024; DistServe, OSDI 2024).

Iterations compute whole prompts, first come, first served, up to the token budget; a prompt that exceeds the
budget is the only one that is split. An iteration that completes a prompt also yields the first token. From
then on the sequence is paused: it keeps slot and KV until the caller has transferred its KV to a decode
worker and ends it here (`EngineCore.abort`). Answers of one token end by themselves.
Without a decode worker no longer answer ever ends: this policy cannot serve an engine on its own.
Memory pressure: a prompt is admitted only if all of it fits, so a sequence is preempted only in favour of the
rest of a split prompt. Paused sequences take room from prompts: the transfer of KV delays the worker.
Horizon: until something changes. With nothing to compute the engine waits for an outside event.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOnly:
    """Computes whole prompts; a sequence that has its first token is paused."""

    supports_mixed_role: ClassVar[bool] = False
    """Whether it can serve a request from its arrival to its end without another engine."""

    max_num_batched_tokens: int = 8192
    """Maximum number of tokens in one iteration."""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens={self.max_num_batched_tokens}: must be >= 1")

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Pauses sequences that have their first token, then computes prompts."""
        for seq in view.decoding:
            step.pause(seq)
        step.budget(self.max_num_batched_tokens)
        for seq in view.prefilling:
            step.prefill(seq, step.tokens_left)
        for seq in view.waiting:
            splits = seq.num_uncomputed > step.tokens_left
            if (splits and step.num_tokens) or not step.admit(seq, step.tokens_left):
                break
        step.wait_until(inf)
        step.repeat()
