"""Dynamic SplitFuse: every forward pass has the same number of tokens (DeepSpeed-FastGen, 2024).

Throughput saturates at some number of tokens in a forward pass, whatever they belong to; so each is composed
to have max_num_batched_tokens of them. Decodes come first and count. Prompts fill the rest in the order in
which they came: long ones are split over several passes, short ones put together, as many as it takes, the
last cut so that the sum is exact. An answer begins in the pass that computes a prompt's last token.
So far this is what `chunked` does. The difference is in what DeepSpeed-MII 0.2 does when KV runs out.
Memory pressure: nobody is preempted for another. A decode that needs a block and finds none stands still for
this pass, and those that have room go on. A prompt gets tokens only while all that is left of it would fit
into the free blocks, and nobody behind it goes before it. Only if nobody at all can go on, all lose their KV
and begin anew in order, prompt and answer so far recomputed (MII: "Deadlock detected").
Horizon: until something changes; one iteration while a decode stands still, or where a new prompt is cut. A
begun prompt goes on for sure while decodes cannot have taken the blocks that its rest leaves: block_size
iterations for every block that there is for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFuse:
    """Decodes, then prompts in order, up to a fixed number of tokens."""

    max_num_batched_tokens: int = 768
    """Tokens in one iteration: the size that every forward pass is composed to have."""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens={self.max_num_batched_tokens}: must be >= 1")

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Compose a pass; if it stays empty although somebody runs, begin anew."""
        step.budget(self.max_num_batched_tokens)
        self._decode(view, step)
        if self._continue_prompts(view, step):
            for seq in view.waiting:
                is_cut = seq.num_uncomputed > step.tokens_left
                if not step.admit(seq, step.tokens_left):
                    break
                if is_cut:
                    step.hold(1)
        if not step.num_tokens:
            stuck = (*view.decoding, *view.prefilling)
            if len(stuck) + len(view.paused) == view.num_running:  # else KV is on its way, and goes on first
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
        """Whether all that were begun have room for their rest, and those behind may have a try."""
        for seq in view.prefilling:
            num_spare = view.num_free_blocks - view.num_blocks_missing(seq)
            if num_spare < 0:
                return False
            if seq.num_uncomputed > step.tokens_left and view.num_decoding:
                step.hold(1 + num_spare // view.num_decoding * view.block_size)
            step.prefill(seq, step.tokens_left)
        return True
