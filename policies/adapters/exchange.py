"""Adapter exchange: a limited number of adapters is served for a while, then others, as in LoRAX.

After Predibase's LoRAX (2023), its adapter exchange scheduling. Requests are batched over the active adapters
only. The next adapter in turn is loaded while the others are served. An adapter that has been active for
`cycle_time_s` stops taking new requests as soon as others wait, and goes behind them in the queue of
adapters. Its running requests go on, and keep its slot: with fewer active adapters than slots, the next
adapter need not wait for them.

    a b c d e wait; 2 active, 3 slots:    a b | a leaves, c comes: b c (a drains) | c d (b drains) | ...

So no adapter waits for longer than the others' turns: of n that always have requests, m of them active, each
is active again after (n / m) cycles and the time that running requests take to end.
Memory pressure: none. Horizon: event, or until the next turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies.adapters import check_time
from policies.adapters.fixed_slots import FixedSlots, SlotResidents
from policies.adapters.registry import Registry
from policies.caching.pool import BlockPool
from policies.core.sequence_view import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange(FixedSlots):
    """Settings of adapter exchange; the slots are those of vLLM."""

    max_active_adapters: int = 6
    """Number of adapters that take new requests at a time; further slots are for adapters that drain."""
    cycle_time_s: float = 2.0
    """Time in seconds for which an adapter stays active once others wait."""

    def __post_init__(self) -> None:
        FixedSlots.__post_init__(self)
        check_time("cycle_time_s", self.cycle_time_s)
        if self.pinned:
            raise ValueError(f"pinned={list(self.pinned)}: must be [], as all adapters take turns")
        if self.prefetch:
            raise ValueError(f"prefetch={self.prefetch}: must be 0; the next in turn is loaded in any case")
        if not 1 <= self.max_active_adapters <= self.max_loras:
            raise ValueError(
                f"max_active_adapters={self.max_active_adapters}: must be >= 1 and <= "
                f"max_loras={self.max_loras}, the slots"
            )

    def residents(self, registry: Registry, pool: BlockPool) -> ExchangeResidents:
        """Returns the slots of an engine, in which adapters take turns."""
        self.check(registry)
        return ExchangeResidents(
            registry,
            num_slots=self.max_loras,
            slot_rank=self.max_lora_rank,
            max_active=self.max_active_adapters,
            cycle_time_s=self.cycle_time_s,
            eviction=self.eviction,
            max_host=self.max_cpu_loras,
        )


class ExchangeResidents(SlotResidents):
    """Adapters in slots that take turns."""

    def __init__(self, registry: Registry, *, max_active: int, cycle_time_s: float, **slots: Any) -> None:
        super().__init__(registry, **slots)
        self._max_active = max_active
        self._cycle_time_s = cycle_time_s
        self._active: dict[str, float] = {}  # end of its turn in seconds; the longest active first
        self._pending: dict[str, None] = {}  # adapters with waiting requests, in order

    @property
    def active(self) -> tuple[str, ...]:
        """Adapters that take new requests."""
        return tuple(self._active)

    def wait(self, seq: SequenceView) -> None:
        super().wait(seq)
        name = seq.request.adapter
        if name is not None and name not in self._active:
            self._pending[name] = None

    def unwait(self, seq: SequenceView) -> None:
        super().unwait(seq)
        name = seq.request.adapter
        if name is not None and name not in self._waiting:
            self._pending.pop(name, None)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Ends the turns that are over, and starts the next ones."""
        for name in [name for name in self._active if name not in self._waiting and not self._users[name]]:
            del self._active[name]
        num_waiting = len(self._pending)
        num_over = sum(until_s <= now for until_s in self._active.values())
        num_leaving = min(num_over, num_waiting - (self._max_active - len(self._active)))
        for name in list(self._active)[: max(0, num_leaving)]:
            del self._active[name]
            if name in self._waiting:
                self._pending[name] = None
        for name in list(self._pending)[:num_waiting]:
            is_here = self.is_resident(name)
            if len(self._active) == self._max_active or not (is_here or self._fits_without_idle(name)):
                break
            del self._pending[name]
            self._active[name] = now + self._cycle_time_s
            if not is_here:
                self._load(name)
        if self._pending and self._active:
            until_s = min(self._active.values())
            if until_s > now:
                step.hold(until_s=until_s)
                step.wait_until(until_s)

    def may_start(self, seq: SequenceView) -> bool:
        return seq.request.adapter is None or seq.request.adapter in self._active

    def _fits_without_idle(self, name: str) -> bool:
        return self._fits(name) or self._victim(name) is not None

    def _victim(self, keep: str | None = None) -> str | None:
        idle = self._idle
        self._idle = {name: None for name in idle if name not in self._active}
        victim = super()._victim(keep)
        self._idle = idle
        return victim
