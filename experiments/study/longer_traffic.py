"""Traffic of a scenario with as many requests as a run needs, whatever number its workload has."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

from sim.setup.scenario import Scenario
from sim.workload.base import BeginsByRate, Source, is_open_loop
from sim.workload.listed import listed, repeated

DRAWN = ("num_requests", "num_conversations", "num_tasks")
"""Settings of generated workloads with the number that they draw: with a larger one the draws go on."""


class Traffic(NamedTuple):
    """A scenario and the traffic of its run."""

    scenario: Scenario
    source: Source
    period: int | None = None
    """Number of requests after which it repeats them; None: it does not."""


def longer_traffic(scenario: Scenario, num_requests: int) -> Traffic:
    """Returns about num_requests of a scenario's traffic: fewer than its workload has, as many, or more.

    A generated workload draws more, with the same draws at the beginning. Recorded traffic is repeated, see
    `sim.workload.listed`; if requests follow ended ones it cannot be, and the traffic is returned as it is.
    Raises ValueError for traffic without a rate.
    """
    workload: Any = scenario.workload
    key = next((name for name in DRAWN if getattr(workload, name, None) is not None), None)
    if key == "num_requests" and getattr(workload, "duration_s", None) is None:
        return _of(scenario, num_requests=num_requests)
    most = getattr(workload, "max_requests", 0)
    if most is None or most > num_requests:
        scenario, own, _ = _of(scenario, max_requests=num_requests)
    else:
        own = scenario.source()
    count = own.num_requests or 0
    if key is not None:
        number = max(1, ceil(getattr(workload, key) * num_requests / max(count, 1)))
        longer = {"duration_s": None} if number > getattr(workload, key) else {}
        return _of(scenario, **{key: number}, **longer)
    if count >= num_requests:
        return Traffic(scenario, own)
    if not hasattr(workload, "path") and getattr(workload, "duration_s", None) is not None:
        return _of(scenario, duration_s=workload.duration_s * num_requests / max(count, 1))
    if not is_open_loop(own) or isinstance(own, BeginsByRate):
        return Traffic(scenario, own)
    return Traffic(scenario, repeated(listed(own), num_requests), count)


def last_begin_s(source: Source) -> float:
    """Returns the arrival of the last request, or of the first one of the last session; 0 if unknown."""
    begins_s = source.last_begin_s if isinstance(source, BeginsByRate) else None
    return source.last_arrival_s or begins_s or 0.0


def _of(scenario: Scenario, **settings: Any) -> Traffic:
    """Returns a scenario with other settings of its workload; None removes a limit that it may not have."""
    workload: Any = scenario.workload
    known = {name: value for name, value in settings.items() if hasattr(workload, name)}
    changed = replace(scenario, workload=replace(workload, **known))
    return Traffic(changed, changed.source())
