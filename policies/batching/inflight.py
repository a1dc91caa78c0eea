"""In-flight batching as in TensorRT-LLM: a capacity scheduler admits requests, a budget limits iterations.

Decodes come first, then prompts in prefill, then new ones. With enable_chunked_context a prompt that exceeds
the remaining budget gets a chunk of whole KV blocks, and the remainder of the rounding goes to later prompts
that fit into it completely. Without it, the prompt waits until all of it fits, and no later request overtakes
it. A prompt that exceeds the whole budget is always split (TensorRT-LLM refuses it). The rules follow
TensorRT-LLM's scheduler; docs/policies.md lists each rule with its source, and the features without a
counterpart. capacity_scheduler_policy:
- guaranteed_no_evict (TensorRT-LLM's default): a request is admitted only if the free blocks suffice for all
  requests even with the longest possible outputs (the client's max_tokens, else the model's context). No
  sequence is ever preempted. If requests have no max_tokens, few of them run at once.
- static_batch: the same, but prompts are only computed while no sequence decodes.
- max_utilization: a request is admitted if its prompt fits now, in addition to the rest of split prompts.
When KV
  memory runs out, the sequence of largest rank is preempted ("paused") and recomputed later.
context_chunking_policy: first_come_first_served, or equal_progress: prompts that do not all fit get one block
each in turn until the budget is used up.
Prefixes (enable_prefix_aware_scheduling): if this iteration computes a prompt's prefix for another prompt,
the prompt waits for the next iteration, in which it has a cache hit; later prompts overtake it.
Batch waiting (off by default): while sequences decode, prompts that could run wait until decodes and prompt
chunks together fill batch_wait_max_tokens_ratio of the budget, or for batch_wait_timeout_iters iterations.
Prompts then run in fewer and larger iterations, at the cost of a longer TTFT. With batch_wait_min_prompts,
that number of prompts also ends the wait: TensorRT-LLM's attention_dp_config.enable_balance waits for a
prompt on each rank of attention data parallelism, so that all ranks compute prompts in the same iteration.
Horizon: the plan repeats until something changes, or until batch waiting ends. A split prompt gets chunks of
the same size until the rest fits: for (remaining tokens of the prompt - remaining budget) / chunk size
iterations, rounded up; one iteration if a prompt waits for budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import Checked, NonNegativeInt, OneOf, PositiveInt, Share
from policies.core.sequence import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView

GUARANTEED_NO_EVICT, STATIC_BATCH, MAX_UTILIZATION = "guaranteed_no_evict", "static_batch", "max_utilization"
CAPACITY_SCHEDULER_POLICIES = (GUARANTEED_NO_EVICT, MAX_UTILIZATION, STATIC_BATCH)
EQUAL_PROGRESS = "equal_progress"
CONTEXT_CHUNKING_POLICIES = ("first_come_first_served", EQUAL_PROGRESS)


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight(Checked):
    """Decodes and prompts share iterations, within a token budget and a reservation of KV blocks."""

    max_num_batched_tokens: PositiveInt = 8192
    """Maximum number of tokens in one iteration (max_num_tokens in TensorRT-LLM)."""
    capacity_scheduler_policy: Annotated[str, OneOf(CAPACITY_SCHEDULER_POLICIES)] = "guaranteed_no_evict"
    """Capacity policy: guaranteed_no_evict, max_utilization or static_batch."""
    enable_chunked_context: bool = True
    """Whether prompts are split into chunks that fit the remaining budget."""
    context_chunking_policy: Annotated[str, OneOf(CONTEXT_CHUNKING_POLICIES)] = "first_come_first_served"
    """Order of prompts that do not all fit the budget: first_come_first_served or equal_progress."""
    enable_prefix_aware_scheduling: bool = True
    """Whether a prompt waits for a prefix that the same iteration computes for another prompt."""
    batch_wait_timeout_iters: NonNegativeInt = 0
    """Maximum number of decode iterations for which prompts wait for others; 0: they do not wait."""
    batch_wait_min_prompts: NonNegativeInt = 0
    """Number of waiting prompts that ends the wait, such as one per rank of attention data parallelism; 0:
    unused.
    """
    batch_wait_max_tokens_ratio: Share = 0.0
    """Share of the budget that decodes and prompts must fill to end the wait; 0: prompts do not wait."""
    _wait: dict[str, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    """since: the iteration from which the current wait counts; count: iterations of an interrupted wait."""

    @property
    def max_unasked_decodes(self) -> int:
        """Number of decodes within the budget."""
        return self.max_num_batched_tokens

    @property
    def _reserves(self) -> bool:
        return self.capacity_scheduler_policy != MAX_UTILIZATION

    @property
    def _takes_turns(self) -> bool:
        return self.enable_chunked_context and self.context_chunking_policy == EQUAL_PROGRESS

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Schedules decodes, prompts in prefill and new prompts, as the capacity policy allows."""
        step.budget(self.max_num_batched_tokens)
        most = step.tokens_left  # for a prompt alone in its iteration; drafting may need a part
        if not self._reserves:
            _keep_rests(view, step)
        num_free = _num_unreserved(view) if self._reserves and view.num_waiting else 0
        step.decode_all()
        if self.capacity_scheduler_policy == STATIC_BATCH and view.num_decoding:
            step.repeat()
            return
        num_decodes = step.num_tokens
        limits_wait = self.batch_wait_max_tokens_ratio or self.batch_wait_min_prompts
        waits = bool(self.batch_wait_timeout_iters and limits_wait)
        shares: dict[int, int] = {}
        if (waits or self._takes_turns) and (view.prefilling or view.num_waiting):
            shares = self._shares(view, step, num_free, most)
        if waits:
            num_iterations = self._iterations_to_wait(view, step, sum(shares.values()))
            if num_iterations:
                step.repeat(num_iterations)
                return
        num_rest = 0  # blocks for the rest of split prompts
        for seq in view.prefilling:
            num_left = seq.num_uncomputed
            num_tokens = self._share(seq, num_left, shares, step, view.block_size, may_split=True)
            step.prefill(seq, num_tokens)
            num_rest += _num_blocks_left(seq, num_left - num_tokens, view.block_size)
            self._close(step, num_left, num_tokens)
        num_rest = self._admit(view, step, shares, num_decodes, num_free, num_rest, most)
        if waits and (step.num_tokens > num_decodes or any(shares.values())):
            step.hold(1)  # the rest of a split prompt, or a prompt without memory, may wait again
        if num_rest and not self._reserves:
            _hold_while_free(view, step, num_rest)
        step.repeat()

    def _admit(
        self,
        view: StepView,
        step: StepBuilder,
        shares: dict[int, int],
        num_decodes: int,
        num_free: int,
        num_rest: int,
        most: int,
    ) -> int:
        """Admits waiting sequences as the capacity policy allows; returns num_rest plus their blocks.

        num_free: blocks that no running sequence will need. num_rest: blocks for the rest of split prompts.
        """
        num_skipped = num_kept = 0  # prompts that wait for budget, and their blocks
        for seq in view.waiting:
            if (
                self.enable_prefix_aware_scheduling
                and step.num_tokens > num_decodes
                and view.finds_planned(seq)
            ):
                step.hold(1)
                continue
            if view.num_running + num_skipped >= view.max_num_seqs and num_skipped:
                break
            num_blocks = self._num_blocks(seq, view) if self._reserves or num_rest + num_kept else 0
            if self._reserves:
                num_free -= num_blocks
                if num_free < 0 and view.num_running:
                    break
            elif num_blocks and num_blocks > view.num_free_blocks - num_rest - num_kept:
                break
            num_left = seq.num_uncomputed - view.num_found(seq)
            num_tokens = self._share(seq, num_left, shares, step, view.block_size, may_split=num_left > most)
            if step.admit(seq, num_tokens):
                num_rest += _num_blocks_left(seq, num_left - num_tokens, view.block_size)
                self._close(step, num_left, num_tokens)
                continue
            if not self.enable_chunked_context:
                if any(num_left <= limit < seq.num_uncomputed for limit in (step.tokens_left, most)):
                    step.hold(1)  # the prefix may be evicted from the cache, so the prompt is split
                break
            if num_tokens or step.tokens_left < 1:
                if num_tokens and self._takes_turns:
                    step.hold(1)  # without memory its share may be 0 in the next step, with another cause
                break
            num_skipped += 1
            num_kept += num_blocks or self._num_blocks(seq, view)
            step.hold(1)  # a later prompt may find a prefix and then fit
        return num_rest

    def _num_blocks(self, seq: SequenceView, view: StepView) -> int:
        """Returns the free blocks that a waiting sequence needs: now, or up to its longest output."""
        num_blocks = view.num_blocks_to_admit(seq)
        if not self._reserves:
            return num_blocks
        return num_blocks + _num_blocks_at_end(seq, view) + -seq.num_known // view.block_size

    def _share(
        self,
        seq: SequenceView,
        num_left: int,
        shares: dict[int, int],
        step: StepBuilder,
        block_size: int,
        *,
        may_split: bool,
    ) -> int:
        """Returns how many of a prompt's num_left remaining tokens are computed in this step.

        may_split: whether it has begun or exceeds the whole budget, so it is split anyway.
        """
        num_tokens = step.tokens_left
        if self._takes_turns:
            share = shares.get(seq.request_id, 0)
            if share < num_left:
                step.hold(1)
            return share or (0 if step.num_tokens else min(num_left, num_tokens))
        share = self._chunk(num_left, num_tokens, block_size, may_split=may_split)
        if num_left <= num_tokens or not (self.enable_chunked_context or may_split):
            return share
        if share:
            step.hold(-(-(num_left - num_tokens) // share))
        # An otherwise empty step computes less than a block, so that a budget below block_size still works.
        return share or (0 if step.num_tokens else num_tokens)

    def _chunk(self, num_left: int, num_tokens: int, block_size: int, *, may_split: bool) -> int:
        """Returns the chunk size of a prompt that gets up to num_tokens of its num_left remaining tokens."""
        if num_left <= num_tokens:
            return num_left
        return num_tokens // block_size * block_size if self.enable_chunked_context or may_split else 0

    def _close(self, step: StepBuilder, num_left: int, num_tokens: int) -> None:
        """Ends the step after a split prompt, if only prompts that exceed the budget are split."""
        if num_tokens < num_left and not self.enable_chunked_context:
            step.budget(step.num_tokens)

    def _shares(self, view: StepView, step: StepBuilder, num_free: int, most: int) -> dict[int, int]:
        """Returns the tokens that each prompt would get in this step, by request id.

        num_free: blocks that no running sequence will need. Prefixes of this step count as missing.
        """
        prompts = [(seq.request_id, seq.num_uncomputed, True) for seq in view.prefilling]
        if not self._reserves:
            num_free = view.num_free_blocks - sum(map(view.num_blocks_missing, view.prefilling))
        num_slots = view.max_num_seqs - view.num_running
        for seq in view.waiting:
            num_free -= self._num_blocks(seq, view)
            if num_slots < 1 or num_free < 0:
                break
            num_slots -= 1
            num_left = seq.num_uncomputed - view.num_found(seq)
            if num_left < seq.num_uncomputed:
                step.hold(1)  # what it finds may be evicted
            prompts.append((seq.request_id, num_left, num_left > most))
        if self._takes_turns:
            lengths = {request_id: num_left for request_id, num_left, _ in prompts}
            return _equal_shares(lengths, step.tokens_left, view.block_size)
        shares, num_tokens = {}, step.tokens_left
        for request_id, num_left, may_split in prompts:
            share = self._chunk(num_left, num_tokens, view.block_size, may_split=may_split)
            if share < num_left and not self.enable_chunked_context:
                if may_split:
                    shares[request_id] = share
                break
            shares[request_id] = share
            num_tokens -= share
        return shares

    def _iterations_to_wait(self, view: StepView, step: StepBuilder, num_tokens: int) -> int:
        """Returns the number of iterations, including this one, for which prompts wait for others.

        num_tokens: tokens of the prompts that could run now. If there are none, the wait is interrupted.
        """
        since = self._wait.pop("since", None)
        if since is not None:
            self._wait["count"] = view.num_iterations - since
        if not (num_tokens and step.num_tokens):
            if not self.batch_wait_max_tokens_ratio:
                self._wait.clear()  # the wait for other ranks restarts
            return 0
        count = self._wait.pop("count", 0)
        if count >= self.batch_wait_timeout_iters or self._enough(view, step.num_tokens + num_tokens):
            return 0
        self._wait["since"] = view.num_iterations - count
        if not self._reserves:  # prompts could run until decodes take their blocks
            num_needed = sum(map(view.num_blocks_missing, view.prefilling))
            if not view.prefilling:
                num_needed = self._num_blocks(next(iter(view.waiting)), view)
            _hold_while_free(view, step, num_needed)
        return self.batch_wait_timeout_iters - count

    def _enough(self, view: StepView, num_tokens: int) -> bool:
        """Returns whether there are enough prompts, or tokens in an iteration, to end the wait."""
        if 0 < self.batch_wait_min_prompts <= view.num_prompts:
            return True
        return 0 < self.batch_wait_max_tokens_ratio * self.max_num_batched_tokens <= num_tokens


def _equal_shares(lengths: dict[int, int], num_tokens: int, block_size: int) -> dict[int, int]:
    """Divides num_tokens among prompts: each gets a block, or its rest, in turn, until none fits.

    lengths: their remaining tokens, by request id.
    """
    if sum(lengths.values()) <= num_tokens:
        return lengths
    shares, has_grown = dict.fromkeys(lengths, 0), True
    while has_grown:
        has_grown = False
        for request_id, num_left in lengths.items():
            more = min(block_size, num_left - shares[request_id])
            if 0 < more <= num_tokens:
                shares[request_id] += more
                num_tokens -= more
                has_grown = True
    return shares


def _keep_rests(view: StepView, step: StepBuilder) -> None:
    """Preempts until this step's decodes fit, without the blocks reserved for the rest of split prompts."""
    while prefilling := view.prefilling:
        num_free = view.num_free_blocks - sum(map(view.num_blocks_missing, prefilling))
        if view.num_decoding <= num_free or sum(map(view.needs_block, view.decoding)) <= num_free:
            return
        step.preempt(max((*view.decoding, *prefilling), key=lambda seq: (seq.rank, seq.request_id)))


def _hold_while_free(view: StepView, step: StepBuilder, num_blocks: int) -> None:
    """Limits the promise to iterations after which num_blocks are certain to be free."""
    num_growing = max(1, view.num_decoding)
    num_spare = view.num_free_blocks - num_blocks
    step.hold(max(1, num_spare // num_growing) if view.max_tokens_per_pass == 1 else 1)


def _num_unreserved(view: StepView) -> int:
    """Returns the number of free blocks if all running sequences reach their maximum length."""
    return view.num_free_blocks - sum(
        max(0, _num_blocks_at_end(seq, view) - view.num_blocks_held(seq)) for seq in view.running
    )


def _num_blocks_at_end(seq: SequenceView, view: StepView) -> int:
    """Returns the number of blocks that are reserved for a sequence: for prompt and longest output.

    This is one block too many if its last token, which has no KV, would be the first of a block.
    """
    return min(-(-seq.max_num_tokens // view.block_size), view.num_blocks)


def _num_blocks_left(seq: SequenceView, num_left: int, block_size: int) -> int:
    """Returns the number of blocks that the last num_left known tokens of a sequence will take."""
    return -(-seq.num_known // block_size) - -(-(seq.num_known - num_left) // block_size)
