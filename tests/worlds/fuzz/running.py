"""Runs a world in several ways: in leaps or steps, or with engines that check themselves."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

from experiments.conformance.recording_core import RecordingCore
from policies.core.request import Request
from sim.cluster.simulation import Simulation
from sim.metrics.result import RunResult
from sim.records.run import RunRecords
from sim.setup import pool as setup_pool
from sim.setup import scenario as setup_scenario
from sim.setup.scenario import Scenario
from sim.workload.base import Arrival, Source

MAX_REPORTS = 500
"""Limit of reports of a run, one per some thousand events, above which it is taken as endless."""
MAX_RUN_S = 60
"""Limit of the processor time of a run, for loops without events."""


class EndlessRunError(Exception):
    """A run that does not end."""


class NotedSource:
    """The traffic of a run, with notes on what it gave and what was reported to it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.given: dict[int, Arrival] = {}
        self.ends: list[tuple[int, float, int]] = []
        """(request id, time in seconds, output tokens) of every end that the simulation reported."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def arrivals(self) -> Iterator[Arrival]:
        """Yields the arrivals of the source."""
        for arrival in self._source.arrivals():
            yield self._noted(arrival)

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        """Returns the requests of the source that follow one that has ended."""
        self.ends.append((request.request_id, now, num_output_tokens))
        following = self._source.follow_ups(request, now, num_output_tokens)
        return [self._noted(arrival) for arrival in following]

    def _noted(self, arrival: Arrival) -> Arrival:
        assert arrival.request.request_id not in self.given, "a request id is given twice"
        self.given[arrival.request.request_id] = arrival
        return arrival


class Run(NamedTuple):
    """A run of a world: its result, its traffic, and its simulation, which holds the engines."""

    result: RunResult
    source: NotedSource
    simulation: Simulation
    cores: list[RecordingCore]
    """All engines that record, with those that were lost in crashes."""

    @property
    def records(self) -> RunRecords:
        return self.result.records


def run(scenario: Scenario, *, leap: bool = True, records_decisions: bool = False) -> Run:
    """Runs a world in one part. records_decisions: with engines that record decisions and check them."""
    made: list[Simulation] = []
    cores: list[RecordingCore] = []

    def simulation(**settings: Any) -> Simulation:
        made.append(Simulation(**settings))
        return made[-1]

    def core(**settings: Any) -> RecordingCore:
        cores.append(RecordingCore(**settings))
        return cores[-1]

    scenario = replace(scenario, sim=replace(scenario.sim, leap=leap, shards=None))
    source = NotedSource(scenario.source())
    with patch.object(setup_scenario, "Simulation", simulation), _limited():
        if records_decisions:
            with patch.object(setup_pool, "EngineCore", core):
                result = scenario.run(source, _Reports()).in_pandas()
        else:
            result = scenario.run(source, _Reports()).in_pandas()
    return Run(result, source, made[-1], cores)


class _Reports:
    """Counts the reports of a run, and ends it if there are too many."""

    def __init__(self) -> None:
        self._num = 0

    def __call__(self, time_s: float, num_ended: int) -> None:
        self._num += 1
        if self._num > MAX_REPORTS:
            raise EndlessRunError(f"the run has not ended at {time_s:.6g} s, with {num_ended} ended requests")


@contextmanager
def _limited() -> Iterator[None]:
    """Ends a run that takes too long in the main thread, where the system can interrupt it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise EndlessRunError(f"the run has not ended after {MAX_RUN_S} s of processor time")

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, MAX_RUN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
