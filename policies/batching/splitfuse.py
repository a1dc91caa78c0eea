"""Dynamic SplitFuse: every forward pass has the same number of tokens (DeepSpeed-FastGen, 2024).

Throughput saturates at some number of tokens per forward pass, regardless of their requests, so each pass is
filled with max_num_batched_tokens tokens. Decodes come first. Prompts fill the rest in the order of their
arrival: long ones are split over several passes, short ones are combined, and the last one is split so that
the sum is exact. The pass that computes a prompt's last token produces the first output token. Up to here
this is the same as `chunked`. The difference is how DeepSpeed-MII 0.2 reacts when KV memory runs out. Memory
pressure: no sequence is preempted for another. A decode that needs a block and finds none pauses for this
pass, while the others continue. A prompt gets tokens only if all its remaining tokens would fit into the free
blocks, and no later request overtakes it. If no sequence can continue, all of them are preempted and
recomputed in order, with the output tokens so far (MII: "Deadlock detected"). Horizon: the plan repeats until
something changes; it holds for one iteration while a decode pauses, or if a new prompt is split. A prompt in
prefill is certain to continue until the decodes could have taken the free blocks that it does not need:
block_size iterations for each of these blocks per decode.
"""

from __future__ import annotations

from dataclasses import dataclass

from fieldlimits import Checked, PositiveInt
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFuse(Checked):
    """Decodes first, then prompts in order, up to a fixed number of tokens."""

    max_num_batched_tokens: PositiveInt = 768
    """Number of tokens with which every forward pass is filled, if there are enough."""

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Fills a forward pass; if it stays empty although sequences run, preempts them all."""
        step.budget(self.max_num_batched_tokens)
        self._decode(view, step)
        if self._continue_prompts(view, step):
            for seq in view.waiting:
                splits = seq.num_uncomputed > step.tokens_left
                if not step.admit(seq, step.tokens_left):
                    break
                if splits:
                    step.hold(1)
        if not step.num_tokens:
            stuck = (*view.decoding, *view.prefilling)
            if len(stuck) + len(view.paused) == view.num_running:  # else wait for loads
                for seq in stuck:
                    step.preempt(seq)
        step.repeat()

    def _decode(self, view: StepView, step: StepBuilder) -> None:
        if view.num_decoding <= view.num_free_blocks:
            step.decode_all()
            return
        for seq in view.decoding:
            if view.num_free_blocks or not view.needs_block(seq):
                step.decode(seq)

    def _continue_prompts(self, view: StepView, step: StepBuilder) -> bool:
        """Continues prefills.

        Returns whether blocks remain for the rest of all of them, so that more may start.
        """
        for seq in view.prefilling:
            num_spare = view.num_free_blocks - view.num_blocks_missing(seq)
            if num_spare < 0:
                return False
            if seq.num_uncomputed > step.tokens_left and view.num_decoding:
                step.hold(1 + num_spare // view.num_decoding * view.block_size)
            step.prefill(seq, step.tokens_left)
        return True
