"""Continuous batching with chunked prefill: one token budget for decodes and prompt chunks.

This is the default of vLLM v1, which follows Sarathi-Serve's stall-free batching (Agrawal et al., OSDI 2024):
running sequences come first, then waiting ones in order; each prompt gets a chunk of at most the remaining
budget. Sarathi-Serve itself is this policy with a small budget: batching=sarathi.
With long_prefill_token_threshold several prompts can be in prefill at the same time, and running sequences
are served in the order of their admission, decodes and prefills mixed, as in vLLM. Without it, only the last
running sequence can be in prefill, unless the end of a prompt is kept together for a proposer. Two settings
are separate policies: vLLM v0's max_num_partial_prefills, which v1 accepts only at its default
(batching=partial_prefills), and prefill_schedule_interval (batching=paced_prefills).
Memory pressure: the sequence of largest rank is preempted and recomputed later; a step that preempts admits
no sequence. A request is admitted only if there are blocks for its whole prompt, or, with
scheduler_reserve_full_isl=false, for its first chunk. In that case more requests run at once, and more are
preempted. Horizon: the plan repeats until something changes. Decodes continue, a prompt that used up the
budget does so again, and a sequence that could not be admitted (no slot, no block, no budget) cannot be
admitted until a sequence ends. There is one exception: a prompt that is limited by the threshold leaves some
of the budget, and the blocks that it computes may become prefix cache hits of a waiting request, which then
fits. While a sequence waits for blocks next to such a prompt, every iteration is decided again. The same
applies with scheduler_reserve_full_isl=false while a sequence with a cached prefix waits for blocks: once the
prefix is evicted, the first chunk alone may fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, NonNegativeInt, PositiveInt, check
from policies.core.plan import FOREVER
from policies.core.sequence import DECODING, PREFILLING
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunked(Checked):
    """One token budget, for the running sequences first, then for new ones."""

    max_num_batched_tokens: PositiveInt = 8192
    """Maximum number of tokens in one iteration."""
    enable_chunked_prefill: bool = True
    """Whether prompts are split into chunks; if False, only prompts that exceed the whole budget are split.
    """
    long_prefill_token_threshold: NonNegativeInt = 0
    """Maximum tokens of one prompt in one iteration while the engine has other requests; 0: no limit."""
    long_prefill_token_threshold_adaptive: bool = False
    """Whether the limit is raised to max_num_batched_tokens / (requests in the engine), if that is more."""
    max_num_scheduled_tokens: int | None = None
    """Maximum tokens scheduled in one iteration, if fewer than max_num_batched_tokens. The rest of the budget
    is for tokens that the model adds. None: max_num_batched_tokens.
    """
    max_num_active_seqs: Annotated[PositiveInt | None, "null for max_num_seqs"] = None
    """Maximum running sequences, if fewer than the engine's max_num_seqs; None: max_num_seqs."""
    scheduler_reserve_full_isl: bool = True
    """Whether an admission needs blocks for the whole prompt; if False, for its first chunk only."""

    def __post_init__(self) -> None:
        check(self)
        num_scheduled = self.max_num_scheduled_tokens
        if num_scheduled is not None and not 1 <= num_scheduled <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_scheduled_tokens={num_scheduled}: must be >= 1 and <= "
                f"max_num_batched_tokens={self.max_num_batched_tokens}, or null for max_num_batched_tokens"
            )
        if self.long_prefill_token_threshold_adaptive and not self.long_prefill_token_threshold:
            raise ValueError(
                "long_prefill_token_threshold_adaptive=true with long_prefill_token_threshold=0: there is no "
                "limit to raise; set long_prefill_token_threshold >= 1"
            )

    @property
    def max_unasked_decodes(self) -> int:
        """Number of decodes within the budget."""
        return self._budget

    @property
    def _budget(self) -> int:
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @property
    def _mixes_prefills(self) -> bool:
        """True if a sequence may decode although it was admitted after one in prefill."""
        return self.long_prefill_token_threshold > 0

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Gives the budget to running sequences, then to new ones."""
        step.budget(self._budget)
        max_chunk = self._max_chunk(view) if self.long_prefill_token_threshold else FOREVER
        self._serve_running(view, step, max_chunk)
        self._admit_waiting(view, step, max_chunk)
        if max_chunk == FOREVER or not self._may_admit_later(view, step):
            step.repeat()

    def _max_chunk(self, view: StepView) -> int:
        """Returns the maximum number of tokens of one prompt in this iteration."""
        num_requests = view.num_running + view.num_waiting
        if num_requests < 2:
            return FOREVER
        if self.long_prefill_token_threshold_adaptive:
            return max(self.long_prefill_token_threshold, self.max_num_batched_tokens // num_requests)
        return self.long_prefill_token_threshold

    def _serve_running(self, view: StepView, step: StepBuilder, max_chunk: int) -> None:
        """Serves running sequences in order of admission, until the budget is spent or one is preempted."""
        in_order = view.prefilling and (self._mixes_prefills or view.mixes_prefills)
        if not in_order and not step.decode_all():
            return
        for seq in view.running if in_order else view.prefilling:
            if seq.state is DECODING:
                served = step.decode(seq)
            elif seq.state is PREFILLING:
                served = step.prefill(seq, max_chunk)
            else:
                continue  # preempted in this step, or paused, or waiting for KV
            if not served and (seq.state in (DECODING, PREFILLING) or not view.serves_past_preempted):
                return

    def _admit_waiting(self, view: StepView, step: StepBuilder, max_chunk: int) -> None:
        """Admits waiting sequences in order, until one is refused or enough are running."""
        if not self.scheduler_reserve_full_isl:
            step.reserve_first_chunks()
        max_running = self.max_num_active_seqs
        for seq in view.waiting:
            if max_running is not None and view.num_running >= max_running:
                return
            may_cut = self.enable_chunked_prefill or seq.num_uncomputed > self._budget
            if not step.admit(seq, max_chunk, may_cut=may_cut):
                return

    @staticmethod
    def _may_admit_later(view: StepView, step: StepBuilder) -> bool:
        """Returns whether a sequence waits for blocks while a prompt in prefill leaves some of the budget."""
        can_add = view.num_running < view.max_num_seqs and step.tokens_left > 0
        return bool(view.num_waiting and view.prefilling) and can_add
