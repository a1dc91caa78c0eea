"""Adapter exchange: a limited number of adapters is active for a time, then others, as in LoRAX.

This is the adapter exchange scheduling of Predibase's LoRAX (2023). Only requests of active adapters are
batched. The next adapter is loaded while the others are served. An adapter that has been active for
`cycle_time_s` stops accepting new requests as soon as other adapters wait, and moves to the end of the queue
of adapters. Its running requests continue, so its slot stays in use. With fewer active adapters than slots,
the next adapter need not wait for them. Example with 2 active adapters, 3 slots, and requests for a, b, c, d,
e:

    a b active  ->  b c active, a drains  ->  c d active, b drains  ->  ...

Every adapter is therefore served again after a bounded time: if n adapters always have requests and m are
active, each is active again after n / m cycles plus the time until running requests have ended.
Memory pressure: none. Horizon: the plan repeats until an event, or until the next exchange.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any

from fieldlimits import Positive, Unit
from policies.adapters.fixed_slots import FixedSlots, SlotResidents
from policies.adapters.serving import Registry
from policies.caching.pool import BlockPool
from policies.core.sequence import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange(FixedSlots):
    """Settings of adapter exchange; slots work as in vLLM."""

    max_active_adapters: int = 6
    """Maximum number of active adapters, which accept new requests; the other slots are for draining ones."""
    cycle_time_s: Annotated[Positive, Unit("s")] = 2.0
    """Time in seconds for which an adapter stays active while others wait."""

    def __post_init__(self) -> None:
        FixedSlots.__post_init__(self)
        if self.pinned:
            raise ValueError(f"pinned={list(self.pinned)}: must be [], because all adapters are exchanged")
        if self.prefetch:
            raise ValueError(f"prefetch={self.prefetch}: must be 0; the next adapter is always loaded ahead")
        if not 1 <= self.max_active_adapters <= self.max_loras:
            raise ValueError(
                f"max_active_adapters={self.max_active_adapters}: must be >= 1 and <= "
                f"max_loras={self.max_loras}, the number of slots"
            )

    def residents(self, registry: Registry, pool: BlockPool) -> ExchangeResidents:
        """Returns the adapter slots of an engine."""
        self.check(registry)
        return ExchangeResidents(
            registry,
            num_slots=self.max_loras,
            slot_rank=self.slots[1],
            max_active=self.max_active_adapters,
            cycle_time_s=self.cycle_time_s,
            eviction=self.eviction,
            max_host=self.max_cpu_loras,
        )


class ExchangeResidents(SlotResidents):
    """Adapters in slots, of which some are active."""

    def __init__(self, registry: Registry, *, max_active: int, cycle_time_s: float, **slots: Any) -> None:
        super().__init__(registry, **slots)
        self._max_active = max_active
        self._cycle_time_s = cycle_time_s
        self._active: dict[str, float] = {}  # time in seconds at which each can be replaced; oldest first
        self._pending: dict[str, None] = {}  # inactive adapters with waiting requests, the next one first

    @property
    def active(self) -> tuple[str, ...]:
        """Adapters that accept new requests."""
        return tuple(self._active)

    def join_queue(self, seq: SequenceView) -> None:
        """Counts a sequence that has joined the queue; its adapter is pending if it is not active."""
        super().join_queue(seq)
        name = seq.request.adapter
        if name is not None and name not in self._active:
            self._pending[name] = None

    def leave_queue(self, seq: SequenceView) -> None:
        """Counts a sequence that has left the queue.

        If it was the adapter's last, the adapter is not pending.
        """
        super().leave_queue(seq)
        name = seq.request.adapter
        if name is not None and name not in self._waiting:
            self._pending.pop(name, None)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Deactivates adapters after their cycle time, and activates and loads pending ones."""
        for name in [name for name in self._active if name not in self._waiting and not self._users[name]]:
            del self._active[name]
        num_waiting = len(self._pending)
        for name in list(self._active)[: self._num_leaving(now)]:
            del self._active[name]
            if name in self._waiting:
                self._pending[name] = None
        for name in list(self._pending)[:num_waiting]:
            is_resident = self.is_resident(name)
            if len(self._active) == self._max_active or not (is_resident or self._fits_evicting(name)):
                break
            del self._pending[name]
            self._active[name] = now + self._cycle_time_s
            if not is_resident:
                self._load(name)
        if self._num_leaving(now):  # an adapter that was just deactivated is also waiting
            step.hold(1)
        if self._pending and self._active:
            until_s = min(self._active.values())
            if until_s > now:
                step.hold(until_s=until_s)
                step.wait_until(until_s)

    def _num_leaving(self, now: float) -> int:
        """Counts the adapters to replace: their time is over, and more adapters wait than can be added."""
        num_over = sum(until_s <= now for until_s in self._active.values())
        num_free = self._max_active - len(self._active)
        return max(0, min(num_over, len(self._pending) - num_free))

    def may_start(self, seq: SequenceView) -> bool:
        """Returns whether the sequence's adapter is active."""
        return seq.request.adapter is None or seq.request.adapter in self._active

    def open_adapters(self) -> Collection[str | None]:
        """Returns the active adapters."""
        return (None, *self._active)

    def _fits_evicting(self, name: str) -> bool:
        return self._fits(name) or self._victim(name) is not None

    def _victim(self, keep: str | None = None) -> str | None:
        idle = self._idle
        self._idle = {name: None for name in idle if name not in self._active}
        victim = super()._victim(keep)
        self._idle = idle
        return victim
