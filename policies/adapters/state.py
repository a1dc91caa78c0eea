"""The state of an engine that serves LoRA adapters, which may be in KV memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from policies.adapters.serving import Residents
from policies.core.limits import Bounds, StopAfter
from policies.core.plan import Cause, StepPlan
from policies.core.request import Request
from policies.core.sequence import FinishReason, Sequence, SequenceView
from policies.core.state import EngineState
from policies.core.waiting_queue import AdapterQueue, Key, WaitingQueue


class AdapterState(EngineState):
    """An engine state in which a sequence is admitted only if its adapter is resident or can be loaded.

    Unused adapters in KV memory are evicted for sequences. `attach` must be called before it is used.
    """

    _residents: Residents

    def attach(self, residents: Residents) -> None:
        """Lets the adapters of an engine decide about its sequences."""
        self._residents = residents
        if type(self.waiting) is WaitingQueue:  # other orders have queues of their own
            self.waiting = AdapterQueue()

    @property
    def num_free_blocks(self) -> int:
        """Number of free KV blocks, including those of unused adapters."""
        return self.block_pool.num_free + self._residents.num_idle_blocks()

    @property
    def is_transferring(self) -> bool:
        """True while KV or an adapter is being loaded or copied."""
        return super().is_transferring or self._residents.is_loading

    def give_way(self) -> None:
        """Loads another adapter, if that lets sequences start, after a step in which nothing could run."""
        self._residents.give_way()

    def bounds_of(self, request: Request, stop_after: StopAfter) -> Bounds:
        """Returns the number of known tokens at which a request would end, and the reason.

        Raises RejectedError if it can never be served, as its adapter is unknown or too little KV is left.
        """
        return self.limits.of(request, stop_after, self._residents.check(request.adapter))

    def candidates(self) -> Iterable[SequenceView]:
        """Returns the waiting sequences that may start, by their adapters."""
        waiting = self.waiting
        found = self._of_open_adapters(waiting) if isinstance(waiting, AdapterQueue) else waiting
        return filter(self._residents.may_start, found)

    def may_start(self, seq: SequenceView) -> bool:
        """Returns whether the adapter of a waiting sequence is resident or could be loaded."""
        return self._residents.may_start(seq)

    def _of_open_adapters(self, waiting: AdapterQueue) -> Iterator[SequenceView]:
        """Yields waiting sequences in order; which adapters are open may change whenever one is admitted."""
        key: Key | None = None
        while True:
            adapters = self._residents.open_adapters()
            seq = waiting.after(key) if adapters is None else waiting.after_of(key, adapters)
            if seq is None:
                return
            key = (seq.rank, seq.request_id)
            yield seq

    def refusal(self, seq: Sequence, num_cached: int, has_preempted: bool) -> Cause | None:
        """Returns the reason why a waiting sequence cannot start, adapter or memory; None if it can."""
        residents = self._residents
        if not residents.may_start(seq):
            return Cause.adapter
        if has_preempted:
            return Cause.memory
        num_missing = residents.num_missing(seq)
        seq.num_adapter_blocks = num_missing - residents.num_idle_blocks(seq)
        cause = super().refusal(seq, num_cached, has_preempted)
        seq.num_adapter_blocks = num_missing
        return cause

    def num_blocks_lacking(self, seq: Sequence, is_alone: bool) -> int:
        """Counts the KV blocks that must become free before a waiting sequence and its adapter fit."""
        residents = self._residents
        seq.num_adapter_blocks = residents.num_missing(seq)
        return super().num_blocks_lacking(seq, is_alone) - residents.num_idle_blocks(seq)

    def cause_if_untried(self) -> Cause:
        """Returns Cause.adapter if the first waiting sequence may not start by its adapter, else policy."""
        first = next(iter(self.waiting), None)  # None: a queue may have no sequence to admit
        is_skipped = first is not None and not self._residents.may_start(first)
        return Cause.adapter if is_skipped else Cause.policy

    def make_room(self, num_blocks: int) -> bool:
        """Evicts unused adapters if necessary, and returns whether num_blocks are free."""
        num_needed = num_blocks + self.num_reserved
        if self.block_pool.num_free >= num_needed:
            return True
        return self._residents.evict_until(lambda: self.block_pool.num_free >= num_needed)

    def complete(self, plan: StepPlan, decoded: dict[int, Sequence]) -> None:
        """Adds the adapter computation to a plan; if adapters changed, the plan holds for one iteration."""
        super().complete(plan, decoded)
        residents = self._residents
        idle = set(plan.idle)
        decoding = [seq for seq in plan.decoding if seq not in idle]
        plan.adapters = residents.use([*decoding, *plan.branched], plan.chunks)
        plan.adapter_puts = residents.take_puts()
        if residents.has_changed:
            residents.has_changed = False
            plan.horizon = 1

    def enqueue(self, seq: Sequence) -> None:
        """Puts a sequence into the waiting queue, and counts it for its adapter."""
        super().enqueue(seq)
        self._residents.join_queue(seq)

    def withdraw(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a waiting sequence."""
        self._residents.leave_queue(seq)
        super().withdraw(seq, reason)

    def start(self, seq: Sequence, num_cached: int, lacks_adapter: bool = False) -> None:
        """Moves a waiting sequence to running, and loads its adapter if necessary."""
        residents = self._residents
        fits = partial(self.block_pool.can_admit, seq, num_cached, not self.running)
        residents.evict_until(fits, keep=seq.request.adapter)
        lacks_adapter = residents.must_wait(seq)
        super().start(seq, num_cached, lacks_adapter)
        residents.start(seq)
        seq.num_transfers += lacks_adapter

    def stop(self, seq: Sequence, num_planned: int, swap: bool) -> None:
        """Moves a running sequence back to waiting; it no longer uses its adapter."""
        self._residents.stop(seq)
        super().stop(seq, num_planned, swap)

    def finish(self, seq: Sequence, reason: FinishReason, num_planned: int = 0) -> None:
        """Ends a running sequence; it no longer uses its adapter."""
        self._residents.stop(seq)
        super().finish(seq, reason, num_planned)

    def check_integrity(self) -> None:
        """Asserts that no block is lost and no adapter in use was evicted."""
        super().check_integrity()
        self._residents.check_integrity(self.running.values())

    @property
    def _num_extra_blocks(self) -> int:
        """Number of KV blocks that adapters occupy."""
        return self._residents.num_blocks
