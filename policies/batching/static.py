"""Static batching: a batch is formed, runs until its slowest member ends, and only then is the next formed.

What FasterTransformer and plain `generate` loops do. The batch takes what waits when the engine is empty, up
to batch_size, in one iteration of whole prompts. A member that ends early stops computing and frees its KV,
but nobody takes its place.
Memory pressure: the sequence of largest rank loses its KV and returns with a later batch.
Horizon: decode iterations repeat until a member ends; arrivals change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.step import StepBuilder, StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """One batch at a time."""

    batch_size: int = 32
    """Sequences in a batch; fewer if fewer wait, or fit."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: must be >= 1")

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Form a batch if the engine is empty, else decode the one there is."""
        if view.num_running:
            step.decode_all()
            step.repeat()
            return
        for seq in view.waiting:
            if view.num_running == self.batch_size or not step.admit(seq, seq.num_uncomputed):
                break
