"""The workers of a disaggregated deployment: one only computes prompts, the other only decodes."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from fieldlimits import Checked, PositiveInt
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOnly(Checked):
    """Computes whole prompts; a sequence with its first token is paused.

    Prefills only: the prefill worker of a disaggregated deployment (Splitwise, ISCA 2024; DistServe, 2024).

    Iterations compute whole prompts in the order of the queue, up to the token budget; only a prompt that
    exceeds the whole budget is split. An iteration that completes a prompt also produces its first token.
    From then on the sequence is paused: it keeps its slot and its KV until the caller has transferred the KV
    to a decode worker and ends the sequence here (`EngineCore.abort`). Outputs of one token end without a
    transfer. Without a decode worker, longer outputs never end, so an engine with this policy cannot serve
    requests alone.
    Memory pressure: a prompt is admitted only if all of it fits, so sequences are preempted only for the rest
    of a split prompt. Paused sequences occupy KV memory, so slow transfers of KV delay the prefills.
    Horizon: the plan repeats until something changes. With nothing to compute the engine waits for an
    external event, such as an arrival or the end of a transfer.
    """

    supports_mixed_role: ClassVar[bool] = False
    """Whether an engine with this policy can serve a request from its arrival to its end."""

    max_num_batched_tokens: PositiveInt = 8192
    """Maximum number of tokens in one iteration."""

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Pauses sequences with a first token, then computes prompts."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOnly(Checked):
    """Decodes sequences; computes prompts only if this worker has preempted them.

    Decodes only: the decode worker of a disaggregated deployment (Splitwise, ISCA 2024; DistServe, OSDI
    2024).

    A request is admitted when the KV of all its known tokens except at most one is available without
    computation: transferred from a prefill worker, in host memory, or in a prefix cache. The missing token is
    computed here. Other requests wait for their KV, and later requests may be admitted before them. Sequences
    that this worker preempted by recomputation have no KV anywhere; they are recomputed in chunks, with the
    budget left by the decodes.
    Memory pressure: the sequence of largest rank is preempted; preemption_mode=swap avoids the recomputation.
    Horizon: the plan repeats until something changes. With nothing to compute the engine waits for an
    external event, such as an arrival or the end of a transfer.
    """

    supports_mixed_role: ClassVar[bool] = False
    """Whether an engine with this policy can serve a request from its arrival to its end."""

    max_num_batched_tokens: PositiveInt = 8192
    """Maximum number of tokens in one iteration."""

    @property
    def max_unasked_decodes(self) -> int:
        """Number of decodes within the budget."""
        return self.max_num_batched_tokens

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Decodes, then admits sequences if their KV is available."""
        step.budget(self.max_num_batched_tokens)
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, step.tokens_left)
        for seq in view.waiting:
            was_preempted = seq.num_preemptions > 0
            if not was_preempted and seq.num_uncomputed - view.num_found(seq) > 1:
                continue
            if not step.admit(seq, step.tokens_left):
                break
        step.wait_until(inf)
        step.repeat()
