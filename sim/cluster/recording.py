"""Receivers of a run's records, which keep them until the end or pass them on in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sim.cluster.fleet import Fleet
from sim.cluster.gateway import Gateway
from sim.engine.clock import Clock
from sim.records.event_rows import EventRows, logged_events, waits_by_request
from sim.records.iterations import IterationLog
from sim.records.requests import RequestLog
from sim.records.run import RunRecords, expanded, own_gaps_table
from sim.records.table import Table
from sim.speculation.log import speculation_record


class RecordedRun(Protocol):
    """The part of a `Simulation` that a recording reads."""

    @property
    def clock(self) -> Clock: ...

    @property
    def fleet(self) -> Fleet: ...

    @property
    def gateway(self) -> Gateway: ...

    @property
    def num_ended(self) -> int:
        """Number of requests that have ended."""

    @property
    def last_end_s(self) -> float:
        """End of the last of them, s."""

    def figures(self, end_s: float) -> dict[str, Any]:
        """Returns the fields of `RunRecords` that are not tables, for a run that ends at end_s."""


class Recording(Protocol):
    """Receives the records of one run."""

    @property
    def requests(self) -> RequestLog:
        """The log in which the parts of the simulation record the requests."""

    def hand_on(self, run: RecordedRun) -> None:
        """Passes on the records so far if a chunk is due; called repeatedly during the run."""

    def end(self, run: RecordedRun, end_s: float, *, interrupted: bool) -> RunRecords:
        """Returns the records of a run that ends at end_s, in seconds."""


class WholeRecording:
    """Keeps all records in memory until the end of the run. requests: an empty log; None: a plain one."""

    def __init__(self, requests: RequestLog | None = None) -> None:
        self.requests = RequestLog() if requests is None else requests

    def hand_on(self, run: RecordedRun) -> None:
        """Does nothing: no record leaves before the end."""

    def end(self, run: RecordedRun, end_s: float, *, interrupted: bool) -> RunRecords:
        """Returns the tables of all requests, iterations and events."""
        return whole_records(self.requests, run, run.figures(end_s), interrupted=interrupted)


def whole_records(
    requests: RequestLog, run: RecordedRun, figures: Mapping[str, Any], *, interrupted: bool
) -> RunRecords:
    """Returns the records of a run whose logs have not been divided. figures: see `tables`."""
    recorders = [replica.recorder for replica in run.fleet.replicas]
    logs = [recorder.iterations.cut() for recorder in recorders]
    rows = [recorder.events.rows for recorder in recorders]
    return tables(requests, logs, rows, figures, interrupted=interrupted)


def tables(
    log: RequestLog,
    logs: list[IterationLog],
    rows: list[EventRows],
    figures: Mapping[str, Any],
    *,
    interrupted: bool,
) -> RunRecords:
    """Returns the records of a run from its logs, which are dropped.

    logs, rows: of the iterations and events of each replica. figures: the fields that are not tables.
    """
    own_gaps = own_gaps_table(logs)
    speculation = speculation_record(logs, [replica.pool for replica in figures["replicas"]])
    columns, gaps = expanded(logs)
    events = logged_events(rows)
    requests = log.table()
    waits = waits_by_request(events, requests["request_id"])
    return RunRecords(
        requests=requests.assign(**waits),
        iterations=Table(columns),
        **gaps._asdict(),
        interrupted=interrupted,
        events=events,
        own_gaps=own_gaps,
        speculation=speculation,
        **figures,
    )
