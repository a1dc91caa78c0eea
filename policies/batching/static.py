"""Batches that no request joins after their start: static, dynamic, and single requests."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated

from fieldlimits import Checked, NonNegative, PositiveInt, Unit
from policies.core.step import StepBuilder
from policies.core.view import StepView


def check_traffic_ends(batching: object, driver: str) -> None:
    """Raises ValueError if a policy waits for the end of the traffic, which is unknown to the driver."""
    if isinstance(batching, Static) and batching.waits_until_full:
        raise ValueError(
            f"batching.waits_until_full=true: must be false, as {driver} does not know when no more requests "
            "come; choose batching=dynamic, which waits for max_queue_delay_s"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Static(Checked):
    """One batch at a time, which no request joins later.

    Static batching: a batch runs until its longest request ends, and only then is the next one formed.

    FasterTransformer and plain `generate` loops work like this. When the engine is empty, waiting requests
    form a batch, up to batch_size and up to the token budget (the first prompt may exceed it and is then
    split). Their prompts are computed, then they decode. A request that ends early is not replaced. By
    default such a request frees its KV and its output is complete; with until_last it keeps slot and KV, and
    all outputs of a batch are complete with its last one, as `generate` returns them. Rows of ended members
    are not computed. With waits_until_full, a batch starts once batch_size requests wait, or if no more
    arrive before one of them has ended: the last batch then runs although it is not full. `Dynamic` waits for
    a limited time.
    Memory pressure: the sequence of largest rank is preempted and recomputed in a later batch; members that
    have ended only lose their memory.
    Horizon: the plan repeats until a request ends; arrivals change nothing.
    """

    batch_size: PositiveInt = 32
    """Maximum number of sequences in a batch."""
    max_num_batched_tokens: PositiveInt = 8192
    """Maximum number of tokens in one iteration, and therefore of a batch's prompts in total."""
    until_last: bool = False
    """Whether members hold their slots and KV, and their outputs are held back, until the last one ends."""

    waits_until_full: bool = False
    """Whether a batch waits for batch_size requests (or the number of slots); only a simulator knows that no
    more will arrive.
    """

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Dynamic(Static):
    """Static batches that wait for more requests for a limited time.

    Dynamic batching: a batch starts when it is full, or when its oldest request has waited long enough.

    This is Triton Inference Server's dynamic batcher: requests are held back until batch_size of them wait
    (preferred_batch_size) or the oldest has been queued for max_queue_delay_s (max_queue_delay_microseconds),
    whichever comes first. The batch then runs as a static one: no request joins until its last request has
    ended. The delay starts at a request's arrival. A batch_size above the number of slots is reduced to that
    number.
    Memory pressure: as for static batching.
    Horizon: as for static batching while a batch runs. Between batches nothing is computed, and the engine
    waits until the oldest request's delay is over.
    """

    max_queue_delay_s: Annotated[NonNegative, Unit("s")] = 0.1
    """Maximum time in seconds for which the oldest waiting request is held back; 0: no delay."""

    def __post_init__(self) -> None:
        Static.__post_init__(self)
        if self.waits_until_full:
            raise ValueError(
                "waits_until_full=true: must be false, as max_queue_delay_s limits the wait; choose "
                "batching=static"
            )
        if self.batch_size == 1 and self.max_queue_delay_s:
            raise ValueError(
                f"max_queue_delay_s={self.max_queue_delay_s} with batch_size=1: one request fills the batch, "
                "so no request is held back; set batch_size above 1, or max_queue_delay_s=0"
            )

    @property
    def max_unasked_decodes(self) -> int:
        """Number of decodes within the budget: a running batch does not wait for more requests."""
        return self.max_num_batched_tokens

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Waits until the next batch is full or the delay has passed; then runs a static batch."""
        if not view.num_running and 0 < view.num_waiting < min(self.batch_size, view.max_num_seqs):
            arrivals_s = [seq.request.arrival_s for seq in view.waiting]  # empty if all wait for adapters
            due_s = min(arrivals_s, default=now) + self.max_queue_delay_s
            if arrivals_s and now < due_s:
                step.wait_until(due_s)
                return
        Static.fill(self, view, step, now)


@dataclass(frozen=True, kw_only=True, slots=True)
class OneAtATime(Checked):
    """Starts the next request when the last one has ended.

    No batching: one request at a time, in the order of the queue.

    A model behind a plain web server works like this; it is a baseline for other policies. The prompt is
    computed, in chunks if it exceeds the token budget, then one token per iteration.
    Memory pressure: none, as a single sequence always fits.
    Horizon: the plan repeats until the request ends; arrivals change nothing.
    """

    max_num_batched_tokens: PositiveInt = 8192
    """Maximum number of tokens in one iteration, and thus in one chunk of a prompt."""

    @property
    def max_unasked_decodes(self) -> int:
        """Number of decodes within the budget."""
        return self.max_num_batched_tokens

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Continues the running request, or begins the next one."""
        step.budget(self.max_num_batched_tokens)
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, step.tokens_left)
        for seq in () if view.num_running else view.waiting:
            step.admit(seq, step.tokens_left)
            break
        step.repeat()
