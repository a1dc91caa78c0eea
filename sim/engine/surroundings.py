"""What the replicas of a run share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from policies.core.sequence import Sequence
from sim.engine.clock import Clock
from sim.records.requests import RequestLog


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """The clock and the records of a run.

    on_end is called with every sequence that ends. leap=False runs iteration by iteration. seed: of the
    world's choices.
    """

    clock: Clock
    requests: RequestLog
    on_end: Callable[[Sequence], None]
    leap: bool = True
    seed: int = 0
