"""An engine that serves LoRA adapters: its state, in which adapters share KV memory with sequences."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from policies.adapters.residents import Residents
from policies.core.limits import Bounds, StopAfter
from policies.core.plan import Cause, StepPlan
from policies.core.request import Request
from policies.core.sequence import FinishReason, Sequence
from policies.core.sequence_view import SequenceView
from policies.core.state import EngineState


class AdapterState(EngineState):
    """A sequence starts only with its adapter there or on its way; unused adapters give way to it."""

    def __init__(self, residents: Residents, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._residents = residents

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that are not in use, with those of unused adapters."""
        return self.pool.num_free + self._residents.num_idle_blocks()

    @property
    def is_awaiting(self) -> bool:
        """Whether KV or an adapter is on its way."""
        return super().is_awaiting or self._residents.is_loading

    def bounds_of(self, request: Request, stop_after: StopAfter) -> Bounds:
        """At how many known tokens a request would end, beside its adapter."""
        return self.limits.of(request, stop_after, self._residents.check(request.adapter))

    def candidates(self) -> Iterable[SequenceView]:
        """Sequences that wait and whose adapter finds a slot."""
        return (seq for seq in self.waiting if self._residents.may_start(seq))

    def refusal(self, seq: Sequence, num_cached: int, is_squeezed: bool) -> Cause | None:
        """Why a waiting sequence cannot have KV memory now: its adapter finds no slot, or both no room."""
        residents = self._residents
        if not residents.may_start(seq):
            return Cause.adapter
        if is_squeezed:
            return Cause.memory
        num_missing = residents.num_missing(seq)
        seq.num_beside = num_missing - residents.num_idle_blocks(seq)
        cause = super().refusal(seq, num_cached, is_squeezed)
        seq.num_beside = num_missing
        return cause

    def waits_unasked_for(self) -> Cause:
        """The adapter, if the first of the waiting is passed over for it; else a policy."""
        first = next(iter(self.waiting), None)  # None: a queue may offer no sequence
        is_passed_over = first is not None and not self._residents.may_start(first)
        return Cause.adapter if is_passed_over else Cause.policy

    def make_room(self, num_blocks: int) -> bool:
        """Whether so many blocks are free, once unused adapters have made room."""
        if self.pool.num_free >= num_blocks:
            return True
        return self._residents.give_way(lambda: self.pool.num_free >= num_blocks)

    def complete(self, plan: StepPlan, decoded: dict[int, Sequence]) -> None:
        """And what the step computes with adapters; where some come or go, the next step looks again."""
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
        """A sequence waits from now on, for its adapter, too."""
        super().enqueue(seq)
        self._residents.wait(seq)

    def withdraw(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence that waits."""
        self._residents.unwait(seq)
        super().withdraw(seq, reason)

    def start(self, seq: Sequence, num_cached: int, lacks_adapter: bool = False) -> None:
        """From waiting to running; its adapter is loaded, if it must be, and others give way."""
        residents = self._residents
        fits = partial(self.pool.can_admit, seq, num_cached, not self.running)
        residents.give_way(fits, keep=seq.request.adapter)
        lacks_adapter = residents.must_wait(seq)
        super().start(seq, num_cached, lacks_adapter)
        residents.start(seq)
        seq.num_transfers += lacks_adapter

    def stop(self, seq: Sequence, num_planned: int, swap: bool) -> None:
        """From running back to waiting; its adapter is used by one sequence less."""
        self._residents.stop(seq)
        super().stop(seq, num_planned, swap)

    def finish(self, seq: Sequence, reason: FinishReason, num_planned: int = 0) -> None:
        """End a running sequence; its adapter is used by one sequence less."""
        self._residents.stop(seq)
        super().finish(seq, reason, num_planned)

    def check_integrity(self) -> None:
        """Assert: no block is lost, and no adapter in use was evicted."""
        super().check_integrity()
        self._residents.check_integrity(self.running.values())

    @property
    def _num_blocks_apart(self) -> int:
        """KV blocks that adapters have."""
        return self._residents.num_blocks
