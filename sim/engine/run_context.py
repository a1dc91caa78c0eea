"""The context of a run that all its replicas share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from policies.core.sequence import Sequence
from sim.engine.clock import Clock
from sim.records.requests import RequestLog


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """The clock, the records and the settings of a run that its replicas share.

    on_end is called with every sequence that ends. leap=False runs iteration by iteration. seed: for the
    random draws of the replicas, such as the parents of branches.
    """

    clock: Clock
    requests: RequestLog
    on_end: Callable[[Sequence], None]
    leap: bool = True
    seed: int = 0
