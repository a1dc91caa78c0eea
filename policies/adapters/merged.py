"""One adapter at a time, merged into the weights: the baseline without segmented kernels.

Hu et al., "LoRA", ICLR 2022, section 4: merged weights cost nothing while they serve. But requests of other
adapters wait until the running ones have ended, and a switch reads and writes all weights twice (the old
adapter out, the new one in) after its adapter has been loaded. The queue decides which adapter is next: that
of the request that has waited longest, once no request waits for the current adapter, or its time is over.
Requests without an adapter need the base weights.
Memory pressure: none. Horizon: event, or until its time is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from policies.adapters import AdapterServing, check_time
from policies.adapters.registry import Registry
from policies.adapters.residents import Residents
from policies.caching.pool import BlockPool
from policies.core.plan import AdapterUse, Chunk
from policies.core.sequence_view import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView

PLAIN = ""
"""Name of the base weights without an adapter, among the adapters' names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged(AdapterServing):
    """Settings of merged adapters."""

    simulation_only: ClassVar[bool] = True

    max_serve_s: float | None = 10.0
    """Time in seconds after which an adapter takes no new requests, if others wait; null: no limit."""

    def __post_init__(self) -> None:
        AdapterServing.__post_init__(self)
        if self.max_serve_s is not None:
            check_time("max_serve_s", self.max_serve_s)
        if self.prefetch:
            raise ValueError(f"prefetch={self.prefetch}: must be 0, as there is one adapter at a time")

    def residents(self, registry: Registry, pool: BlockPool) -> MergedResidents:
        """Returns the state of an engine's weights, without an adapter at first."""
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
        self._until_s = inf  # end of its time in seconds
        self._is_closing = False  # whether it takes no new requests
        self._resident.add(PLAIN)
        self._idle[PLAIN] = None

    def wait(self, seq: SequenceView) -> None:
        super().wait(seq)
        self._look()

    def unwait(self, seq: SequenceView) -> None:
        super().unwait(seq)
        self._look()

    def _look(self) -> None:
        """Stops admissions for the current adapter as soon as only other adapters have waiting requests.

        This happens at the event itself, whenever the next step is made.
        """
        if all(name == self._current for name in self._waiting):
            self._is_closing = False
        elif self._current not in self._waiting:
            self._is_closing = True

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Stops admissions when the time is over, and switches when the last running request has left."""
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
            self._load(others)
            self._current, self._is_closing, self._until_s = others, False, inf

    def may_start(self, seq: SequenceView) -> bool:
        return self._key(seq) == self._current and not self._is_closing

    def use(self, decodes: Iterable[SequenceView], chunks: Iterable[Chunk]) -> AdapterUse | None:
        return None

    def _key(self, seq: SequenceView) -> str | None:
        return seq.request.adapter or PLAIN

    def _fits(self, name: str) -> bool:
        return not self._resident

    def _num_bytes(self, name: str) -> float:
        return 0.0 if name == PLAIN else super()._num_bytes(name)

    def _touch_host(self, name: str) -> str:
        return "host" if name == PLAIN else super()._touch_host(name)
