"""Adapts a workload to engine and simulator: paced to a load, with exact output lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from policies.core.request import Request
from sim.records.table import to_pandas
from sim.setup.scenario import Scenario
from sim.workload.base import Arrival, Source, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Paced:
    """A workload whose clients take `stretch` times as long between their requests.

    max_tokens equals the output length, because the engine has no other way to end an output early.
    """

    workload: Workload
    stretch: float = 1.0

    def source(self, *, seed: int, max_model_len: int) -> Source:
        return _PacedSource(self.workload.source(seed=seed, max_model_len=max_model_len), self.stretch)


class _PacedSource:
    def __init__(self, source: Source, stretch: float) -> None:
        self._source = source
        self._stretch = stretch
        self.num_requests = source.num_requests
        last_s = source.last_arrival_s
        self.last_arrival_s = None if last_s is None else last_s * stretch
        self.patience_s = source.patience_s
        self.notes = source.notes

    def arrivals(self) -> Iterator[Arrival]:
        for arrival in self._source.arrivals():
            yield self._paced(arrival, 0.0)

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        following = self._source.follow_ups(request, now, num_output_tokens)
        return [self._paced(arrival, now) for arrival in following]

    def _paced(self, arrival: Arrival, from_s: float) -> Arrival:
        request, num_tokens = arrival.request, arrival.num_output_tokens
        arrival_s = from_s + self._stretch * (request.arrival_s - from_s)
        paced = request._replace(arrival_s=arrival_s, max_tokens=num_tokens)
        if request.deadline_s is not None:
            paced = paced._replace(deadline_s=arrival_s + request.deadline_s - request.arrival_s)
        return Arrival(paced, num_tokens)


def exact(scenario: Scenario) -> Scenario:
    """Returns the scenario with exact output lengths, at the workload's own pace."""
    return replace(scenario, workload=Paced(workload=scenario.workload))


def at_load(scenario: Scenario, load: float) -> Scenario:
    """Returns the scenario paced to a share of its simulated capacity, the requests/s if all arrived at once.

    Raises ValueError for a workload whose clients leave no time between their requests.
    """
    paced = Paced(workload=scenario.workload)
    own = scenario.simulate(paced.source(seed=scenario.seed, max_model_len=scenario.max_model_len))
    crowd = replace(scenario, workload=replace(paced, stretch=0.0))
    records = crowd.simulate(crowd.source())
    own_s = float(own.requests["arrival_s"].max())
    if not own_s > float(records.requests["arrival_s"].max()):
        raise ValueError(
            f"load={load:g}: the workload's requests arrive all at once, or as soon as others have ended, so "
            "they cannot be paced; set load=null"
        )
    shortest_s = float(to_pandas(records.requests)["last_token_s"].max())
    if math.isnan(shortest_s):
        raise ValueError(f"load={load:g}: the simulated engine finishes none of the requests")
    return replace(scenario, workload=replace(paced, stretch=shortest_s / load / own_s))
