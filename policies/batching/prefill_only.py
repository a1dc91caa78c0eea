"""Prompts only: the prefill worker of a disaggregated deployment (Splitwise, ISCA 2024; DistServe, OSDI 2024)

Iterations of whole prompts, first come, first served, up to the token budget; a prompt that exceeds the
budget is the only one that is split. An iteration that completes a prompt also yields the first token. From
then on the sequence is paused: it keeps slot and KV until somebody outside has taken its KV over to a decode
worker and ends it here (`EngineCore.abort`). Answers of one token end by themselves.
Without a decode worker no longer answer ever ends: this is no policy for an engine on its own.
Memory pressure: a prompt is admitted only if all of it fits, so nobody is preempted but in favour of the rest
of a split prompt. What is paused takes room from prompts: the transfer of KV holds the worker up.
Horizon: until something changes. With nothing to compute the engine waits for what comes from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOnly:
    """Whole prompts; who has its first token stands still."""

    serves_alone: ClassVar[bool] = False
    """Whether it can serve a request from its arrival to its end without another engine."""

    max_num_batched_tokens: int = 8192
    """Tokens in one iteration."""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens={self.max_num_batched_tokens}: must be >= 1")

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Pause who has its first token, then compute prompts."""
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
