"""In-flight batching as in TensorRT-LLM: a capacity scheduler admits requests, a budget limits iterations.

Decodes come first, then prompts in prefill, then new ones. With enable_chunked_context a prompt that exceeds
the remaining budget gets a chunk of whole KV blocks; without it, the prompt waits until all of it fits, and
no later request overtakes it. A prompt that exceeds the whole budget is split in any case (TensorRT-LLM
refuses it).
capacity_scheduler_policy:
- guaranteed_no_evict (TensorRT-LLM's default): a request is admitted only if the KV of all requests would fit
  even with the longest possible outputs (the client's max_tokens, else the model's context). No sequence is
  ever preempted. If requests have no max_tokens, few of them run at a time.
- max_utilization: a request is admitted if its prompt fits now. When KV memory runs out, the sequence of
  largest rank is preempted ("paused") and recomputed later.
Batch waiting (off by default): while sequences decode, prompts wait until decodes and prompts together have
batch_wait_max_tokens_ratio of the budget, or for batch_wait_timeout_iters iterations. Prompts then run in
fewer and larger iterations, and each waits longer for its first token. With batch_wait_min_prompts, that
number of prompts ends the wait, too: TensorRT-LLM's attention_dp_config.enable_balance waits for a prompt on
each rank of attention data parallelism, so that all ranks compute prompts in the same iteration.
Not modelled: context_chunking_policy=EQUAL_PROGRESS (chunks are given first come, first served),
reservations that count shared blocks of a prefix cache once, and waiting prompts without room in KV, which
count towards the ratio here.
Horizon: the plan repeats until something changes, or until batch waiting ends. A split prompt gets chunks of
the same size until the rest fits: for (remaining tokens of the prompt - remaining budget) / chunk size
iterations, rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import Checked, NonNegativeInt, OneOf, PositiveInt, Share
from policies.core.sequence_view import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView

GUARANTEED_NO_EVICT = "guaranteed_no_evict"
CAPACITY_SCHEDULER_POLICIES = (GUARANTEED_NO_EVICT, "max_utilization")


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight(Checked):
    """Decodes and prompts share iterations, within a token budget and a reservation of KV blocks."""

    max_num_batched_tokens: PositiveInt = 8192
    """Maximum number of tokens in one iteration (max_num_tokens in TensorRT-LLM)."""
    capacity_scheduler_policy: Annotated[str, OneOf(CAPACITY_SCHEDULER_POLICIES)] = "guaranteed_no_evict"
    """Capacity policy: guaranteed_no_evict or max_utilization."""
    enable_chunked_context: bool = True
    """Whether prompts are split into chunks that fit the remaining budget."""
    batch_wait_timeout_iters: NonNegativeInt = 0
    """Maximum number of decode iterations that prompts wait for others; 0: they do not wait."""
    batch_wait_min_prompts: NonNegativeInt = 0
    """Waiting prompts that end the wait, such as one per rank of attention data parallelism; 0: no number."""
    batch_wait_max_tokens_ratio: Share = 0.0
    """Share of the budget that decodes and prompts must have to end the wait; 0: prompts do not wait."""
    _wait: dict[str, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    """since: the iteration in which the current wait began."""

    @property
    def max_unasked_decodes(self) -> int:
        """Number of decodes within the budget."""
        return self.max_num_batched_tokens

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Gives the budget to decodes, prompts in prefill and new ones, if the capacity policy allows."""
        step.budget(self.max_num_batched_tokens)
        most = step.tokens_left  # of a prompt that has an iteration to itself; drafting may need a part
        step.decode_all()
        num_decodes = step.num_tokens
        limits_wait = self.batch_wait_max_tokens_ratio or self.batch_wait_min_prompts
        if self.batch_wait_timeout_iters and limits_wait:
            num_iterations = self._iterations_to_wait(view, step)
            if num_iterations:
                step.repeat(num_iterations)
                return
        for seq in view.prefilling:
            num_left = seq.num_uncomputed
            num_tokens = self._chunk(num_left, step, view.block_size, may_split=True)
            step.prefill(seq, num_tokens)
            _close(step, num_left, num_tokens)
        reserves = self.capacity_scheduler_policy == GUARANTEED_NO_EVICT
        num_reserved = _num_reserved(view) if reserves and view.num_waiting else 0
        for seq in view.waiting:
            if reserves:
                num_reserved += _num_blocks_at_end(seq, view.block_size)
                if num_reserved > view.num_blocks:
                    break
            num_left = seq.num_uncomputed - view.num_found(seq)
            num_tokens = self._chunk(num_left, step, view.block_size, may_split=num_left > most)
            if not step.admit(seq, num_tokens):
                limits = (step.tokens_left, most)
                fits_by_hit = any(num_left <= limit < seq.num_uncomputed for limit in limits)
                if fits_by_hit and not self.enable_chunked_context:
                    step.hold(1)  # the prefix may be evicted from the cache, so that the prompt is split
                break
            _close(step, num_left, num_tokens)
        if self._wait and step.num_tokens > num_decodes:
            self._wait.clear()  # a wait without room for any prompt stays over until one runs
        step.repeat()

    def _iterations_to_wait(self, view: StepView, step: StepBuilder) -> int:
        """Returns for how many iterations, this one with its decodes included, prompts wait for others."""
        may_wait = step.num_tokens > 0 and (view.prefilling or view.num_waiting)
        if not may_wait or self._enough_prompts(view) or self._enough_tokens(view, step):
            self._wait.clear()
            return 0
        since = self._wait.setdefault("since", view.num_iterations)
        return max(0, self.batch_wait_timeout_iters - (view.num_iterations - since))

    def _enough_prompts(self, view: StepView) -> bool:
        """Returns whether as many prompts wait, or have begun, as end the wait."""
        return 0 < self.batch_wait_min_prompts <= view.num_prompts

    def _enough_tokens(self, view: StepView, step: StepBuilder) -> bool:
        """Returns whether decodes and prompts together have the share of the budget that ends the wait."""
        if not self.batch_wait_max_tokens_ratio:
            return False
        num_missing = self.batch_wait_max_tokens_ratio * self.max_num_batched_tokens - step.num_tokens
        for seqs in (view.prefilling, view.waiting):
            for seq in seqs:
                if num_missing <= 0:
                    return True
                num_missing -= seq.num_uncomputed
        return num_missing <= 0

    def _chunk(self, num_left: int, step: StepBuilder, block_size: int, *, may_split: bool) -> int:
        """Returns how many of a prompt's num_left remaining tokens are computed in this step.

        may_split: whether it has begun or exceeds the whole budget, so that it is split in any case.
        """
        num_tokens = step.tokens_left
        if num_left <= num_tokens:
            return num_left
        if not (self.enable_chunked_context or may_split):
            return 0
        whole_blocks = num_tokens // block_size * block_size
        if whole_blocks:
            step.hold(-(-(num_left - num_tokens) // whole_blocks))
        # An otherwise empty step computes less than a block, so that a budget below block_size still works.
        return whole_blocks or (0 if step.num_tokens else num_tokens)


def _close(step: StepBuilder, num_left: int, num_tokens: int) -> None:
    """Ends the step after a split prompt: no other prompt gets the rest of the budget."""
    if num_tokens < num_left:
        step.budget(step.num_tokens)


def _num_reserved(view: StepView) -> int:
    """Returns the number of blocks that the running sequences need if all reach their maximum length."""
    return sum(_num_blocks_at_end(seq, view.block_size) for seq in view.running)


def _num_blocks_at_end(seq: SequenceView, block_size: int) -> int:
    """Returns the number of blocks of a sequence at its maximum length; its last token needs no KV."""
    return -(-(seq.max_num_tokens - 1) // block_size)
