"""One adapter at a time, merged into the weights: the baseline without kernels for several adapters.

With merged weights the forward pass costs no more than without an adapter (Hu et al., "LoRA", ICLR 2022,
section 4). However, requests for other adapters wait until the running ones have ended, and a switch reads
and writes all weights twice (to remove the old adapter and to add the new one) after the new adapter has been
loaded. When no request waits for the current adapter, or after max_serve_s, the engine switches to the next
adapter that waiting requests need. If requests still wait for the replaced adapter, it goes behind all
others. The engine also switches if nothing runs and the policies start no request of the current adapter, for
example because scheduling=s3 does not consider it yet. Requests without an adapter need the unmodified base
weights. Memory pressure: none. Horizon: the plan repeats until an event, or until max_serve_s is over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, ClassVar

from fieldlimits import Positive, Unit
from policies.adapters import AdapterServing
from policies.adapters.serving import Registry, Residents
from policies.caching.pool import BlockPool
from policies.core.plan import AdapterUse, Chunk
from policies.core.sequence import Sequence, SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView

PLAIN = ""
"""Name of the base weights without an adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged(AdapterServing):
    """Settings of merged adapters."""

    simulation_only: ClassVar[bool] = True

    max_serve_s: Annotated[Positive | None, Unit("s")] = 10.0
    """Time in seconds after which an adapter accepts no new requests if others wait; null: no limit."""

    def __post_init__(self) -> None:
        AdapterServing.__post_init__(self)
        if self.prefetch:
            raise ValueError(f"prefetch={self.prefetch}: must be 0, because only one adapter is on the GPU")

    def residents(self, registry: Registry, pool: BlockPool) -> MergedResidents:
        """Returns the state of an engine's weights, at first without an adapter."""
        return MergedResidents(
            registry,
            max_serve_s=inf if self.max_serve_s is None else self.max_serve_s,
            max_host=self.max_cpu_loras,
        )


class MergedResidents(Residents):
    """The adapter that is merged into the weights."""

    merges: ClassVar[bool] = True

    def __init__(self, registry: Registry, *, max_serve_s: float, **common: Any) -> None:
        super().__init__(registry, **common)
        self._max_serve_s = max_serve_s
        self._current = PLAIN
        self._until_s = inf  # time in seconds after which it accepts no new requests
        self._is_closing = False  # whether it accepts no new requests
        self._in_vain: set[str] = set()  # adapters without a started request since the last start or arrival
        self._resident.add(PLAIN)
        self._idle[PLAIN] = None

    def join_queue(self, seq: SequenceView) -> None:
        """Counts a sequence that has joined the queue."""
        super().join_queue(seq)
        self._in_vain.clear()
        self._update_closing()

    def leave_queue(self, seq: SequenceView) -> None:
        """Counts a sequence that has left the queue."""
        super().leave_queue(seq)
        self._update_closing()

    def _update_closing(self) -> None:
        """Stops admissions for the current adapter as soon as only other adapters have waiting requests.

        Is called at every change of the queue, so the result does not depend on the time of the next step.
        """
        if all(name == self._current for name in self._waiting):
            self._is_closing = False
        elif self._current not in self._waiting:
            self._is_closing = True

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Stops admissions after max_serve_s, and switches when the last running request has ended."""
        others = next((name for name in self._waiting if name != self._current), None)
        if others is None:
            return
        if self._until_s == inf and self._max_serve_s < inf:
            self._until_s = now + self._max_serve_s
        self._is_closing = self._is_closing or now >= self._until_s
        if not self._is_closing:
            if self._until_s < inf:
                step.hold(until_s=self._until_s)
                step.wait_until(self._until_s)
        elif not self._users and not self._loading:
            self._switch_to(others)

    def start(self, seq: Sequence) -> None:
        """Counts an admitted sequence."""
        super().start(seq)
        self._in_vain.clear()

    def give_way(self) -> None:
        """Switches to the next adapter that requests wait for, if nothing runs.

        Each adapter is tried once, until a request is started or arrives.
        """
        if self._users or self._loading:
            return
        self._in_vain.add(self._current)
        other = next((name for name in self._waiting if name not in self._in_vain), None)
        if other is not None:
            self._switch_to(other)

    def _switch_to(self, name: str) -> None:
        """Loads another adapter; if requests wait for the current one, that one goes behind all others."""
        if self._current in self._waiting:
            self._waiting[self._current] = self._waiting.pop(self._current)
        self._load(name)
        self._current, self._is_closing, self._until_s = name, False, inf

    def may_start(self, seq: SequenceView) -> bool:
        """Returns whether the sequence's adapter is the current one and accepts new requests."""
        return self._key(seq) == self._current and not self._is_closing

    def open_adapters(self) -> Collection[str | None]:
        """Returns the current adapter, if it accepts new requests."""
        return () if self._is_closing else (self._current or None,)

    def use(self, decodes: Iterable[SequenceView], chunks: Iterable[Chunk]) -> AdapterUse | None:
        """Returns None: merged adapters add no computation to a step."""
        return None

    def _key(self, seq: SequenceView) -> str | None:
        return seq.request.adapter or PLAIN

    def _fits(self, name: str) -> bool:
        return not self._resident

    def _num_bytes(self, name: str) -> float:
        return 0.0 if name == PLAIN else super()._num_bytes(name)

    def _touch_host(self, name: str) -> str:
        return "host" if name == PLAIN else super()._touch_host(name)
