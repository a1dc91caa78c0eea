"""Iteration-level scheduling with selective batching (Orca: Yu et al., OSDI 2022, section 3 and algorithm 1).

After every iteration finished requests leave, and waiting requests join in order until batch_size run. A
prompt is computed whole in the iteration that admits it, together with the decodes of the others: all
operators except attention take the tokens of all requests as one batch. There is no token budget: a long
prompt delays the next token of all requests by as long as it takes.
Memory pressure: the paper reserves KV for a request's longest possible answer before it is admitted; choose a
caching policy that does so (caching=contiguous), then no sequence is ever preempted. With paged KV the
sequence of largest rank loses its KV and is recomputed later.
Horizon: until a sequence ends or a request arrives. A request without a slot or memory gets none before.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.core.plan import FOREVER
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class Orca:
    """Whole prompts share iterations with decodes."""

    batch_size: int = 32
    """Maximum number of requests in an iteration."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: must be >= 1")

    @property
    def max_unasked_decodes(self) -> int:
        """Number of decodes that need no call: all, as decodes have no budget."""
        return FOREVER

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Decodes running sequences, then admits whole prompts while the batch has room."""
        step.decode_all()
        for seq in view.prefilling:  # most of its KV was loaded from another tier
            step.prefill(seq, FOREVER)
        for seq in view.waiting:
            if view.num_running >= self.batch_size or not step.admit(seq, FOREVER):
                break
        step.repeat()
