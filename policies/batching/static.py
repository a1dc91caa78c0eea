"""Static batching: a batch runs until its longest request ends, and only then is the next one formed.

FasterTransformer and plain `generate` loops work like this. When the engine is empty, waiting requests form a
batch, up to batch_size and up to the token budget (the first prompt may exceed it and is then split). Their
prompts are computed, then they decode. No other request takes the place of one that ends early. By default
such a request frees its KV and its output is complete; with until_last it keeps slot and KV, and all outputs
of a batch are complete with its last one, as `generate` returns them. Rows of ended members are not computed.
With waits_until_full, a batch starts once batch_size requests wait, or when no more will come before one of
them has ended: then the last batch runs although it is not full. `Dynamic` waits for a limited time.
Memory pressure: the sequence of largest rank is preempted and recomputed in a later batch; of members that
have ended only the memory is freed.
Horizon: the plan repeats until a request ends; arrivals change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fieldlimits import Checked, PositiveInt
from policies.core.step import StepBuilder
from policies.core.view import StepView


def check_traffic_ends(batching: object, driver: str) -> None:
    """Raises ValueError if a policy waits for the end of the traffic, which the driver does not know."""
    if isinstance(batching, Static) and batching.waits_until_full:
        raise ValueError(
            f"batching.waits_until_full=true: must be false, as {driver} does not know when no more requests "
            "come; choose batching=dynamic, which waits for max_queue_delay_s"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Static(Checked):
    """One batch at a time, which no request joins later."""

    batch_size: PositiveInt = 32
    """Maximum number of sequences in a batch."""
    max_num_batched_tokens: PositiveInt = 8192
    """Maximum number of tokens in one iteration, and thus of a batch's prompts together."""
    until_last: bool = False
    """Whether members hold their slots and KV, and their outputs are held back, until the last one ends."""

    waits_until_full: bool = False
    """Whether a batch waits for batch_size requests (or the number of slots); only a simulator knows that no
    more come."""

    @property
    def max_unasked_decodes(self) -> int:
        """Number of decodes within the budget."""
        return self.max_num_batched_tokens

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Forms a batch if the engine is empty, else continues the running one."""
        is_short = not view.num_running and 0 < view.num_waiting < min(self.batch_size, view.max_num_seqs)
        if self.waits_until_full and is_short and not view.traffic_has_ended:
            step.wait_until(inf)
            return
        step.budget(self.max_num_batched_tokens)
        if not view.num_running:
            for seq in view.waiting:
                splits = seq.num_uncomputed > step.tokens_left
                full = view.num_running == self.batch_size or (splits and step.num_tokens)
                if full or not step.admit(seq, step.tokens_left):
                    break
        for seq in () if step.num_tokens else view.prefilling:
            step.prefill(seq, step.tokens_left)
        if not step.num_tokens:
            step.decode_all()
        step.repeat()
