"""Dynamic batching: a batch starts when it is full, or when its oldest request has waited long enough.

This is Triton Inference Server's dynamic batcher: requests are held back until batch_size of them wait
(preferred_batch_size) or the oldest has been queued for max_queue_delay_s (max_queue_delay_microseconds),
whichever comes first. The batch then runs as a static one: no request joins until its last request has ended.
The delay counts from a request's arrival. A batch_size above the number of slots is reduced to that number.
Memory pressure: as for static batching.
Horizon: as for static batching while a batch runs. Between batches nothing is computed, and the engine waits
until the oldest request's delay is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import NonNegative, Unit
from policies.batching.static import Static
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class Dynamic(Static):
    """Static batches that wait for more requests for a limited time."""

    max_queue_delay_s: Annotated[NonNegative, Unit("s")] = 0.1
    """Maximum time in seconds for which the oldest waiting request is held back; 0: requests never are."""

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
        """Waits while the next batch is not full and the delay has not passed, else runs a static batch."""
        if not view.num_running and 0 < view.num_waiting < min(self.batch_size, view.max_num_seqs):
            arrivals_s = [seq.request.arrival_s for seq in view.waiting]  # empty if all wait for adapters
            due_s = min(arrivals_s, default=now) + self.max_queue_delay_s
            if arrivals_s and now < due_s:
                step.wait_until(due_s)
                return
        Static.fill(self, view, step, now)
