"""Records that are flushed during the run, so its memory holds only requests in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sim.cluster.recording import RecordedRun
from sim.engine.replica import Replica
from sim.records.event_rows import PendingWaits, joined_events
from sim.records.iterations import IterationLog
from sim.records.mapped_requests import MappedRequestLog
from sim.records.run import GROUP_ROWS, RecordChunk, RunRecords, joined_iterations, own_gaps_table
from sim.records.table import AnyTable, Gaps, Table
from sim.speculation.log import SpeculationRecord, added_acceptance, speculation_record

MAX_ITERATIONS: Final = 1 << 18
"""Number of iterations after which a chunk is due; their table takes about 25 MB, twice that during its
creation.
"""
REPORTS_BETWEEN_COUNTS: Final = 4


class ChunkedRecording:
    """Passes the records of a run to `take` in chunks, for tables and sums.

    A chunk is due when as many requests have ended as a group has, or after `MAX_ITERATIONS` iterations. The
    last chunk comes at the end of the run; the final records have tables without rows. group_rows: see
    `sim.records.run`; tests have smaller groups.
    """

    def __init__(self, take: Callable[[RecordChunk], None], group_rows: int = GROUP_ROWS) -> None:
        self._take = take
        self._group_rows = group_rows
        self.requests = MappedRequestLog(group_rows)
        self._waits = PendingWaits()
        self._acceptance: AnyTable | None = None
        self._num_ended_at_flush = 0
        self._num_reports = 0

    def hand_on(self, run: RecordedRun) -> None:
        """Passes on all records so far, without the requests of incomplete groups, if a chunk is due."""
        if not self._is_due(run):
            return
        self._num_ended_at_flush = run.num_ended
        end = self.requests.first_row
        busy = None
        while self.requests.group_has_arrived(end):
            busy = busy or {request_id // self._group_rows for request_id in run.gateway.attempts}
            if end // self._group_rows in busy:
                break
            end += self._group_rows
        self._take(self._chunk(run, end, run.last_end_s, _taken_unfilled(run)))

    def end(self, run: RecordedRun, end_s: float, *, interrupted: bool) -> RunRecords:
        """Passes on the last chunk; returns the records without rows."""
        figures = run.figures(end_s)
        last = self._chunk(run, None, end_s, figures.pop("unfilled"))
        speculation = None
        if last.bursts is not None and self._acceptance is not None:
            speculation = SpeculationRecord(acceptance=self._acceptance, bursts=last.bursts[:0])
        end = RunRecords(
            requests=last.requests[:0],
            iterations=last.iterations[:0],
            gap_s=last.gap_s[:0],
            gap_count=last.gap_count[:0],
            gap_end_s=last.gap_end_s[:0],
            interrupted=interrupted,
            events=last.events[:0],
            own_gaps=last.own_gaps[:0],
            unfilled=None if last.unfilled is None else last.unfilled[:0],
            speculation=speculation,
            **figures,
        )
        self._take(replace(last, end=end))
        return end

    def _is_due(self, run: RecordedRun) -> bool:
        self._num_reports += 1
        if run.num_ended - self._num_ended_at_flush >= self._group_rows:
            return True
        if self._num_reports % REPORTS_BETWEEN_COUNTS:
            return False
        logs = (replica.recorder.iterations for replica in run.fleet.replicas)
        return sum(log.num_iterations for log in logs) >= MAX_ITERATIONS

    def _chunk(
        self,
        run: RecordedRun,
        end_row: int | None,
        until_s: float,
        unfilled: NDArray[np.int64] | None,
    ) -> RecordChunk:
        """Takes all logs, and the rows of requests up to end_row - 1 (None: all)."""
        replicas = run.fleet.replicas
        pool_by_replica = [member.pool_index for member in run.fleet.members]
        own_gaps, speculation, iterations, gaps = self._taken_iterations(replicas, pool_by_replica)
        events = joined_events([replica.recorder.events.cut() for replica in replicas])
        self._waits.add(events)
        requests = self.requests.take(end_row)
        waits = self._waits.take(requests["request_id"], self.requests.first_row)
        return RecordChunk(
            requests=requests.assign(**waits),
            iterations=iterations,
            **gaps._asdict(),
            own_gaps=own_gaps,
            events=events,
            bursts=None if speculation is None else speculation.bursts,
            unfilled=unfilled,
            unfilled_since=None if unfilled is None else _unfilled_since(run),
            later_since_s=min(until_s, self.requests.earliest_arrival_s()),
            iterations_since_s=min([run.clock.now, *(replica.running_since_s for replica in replicas)]),
            pool_by_replica=np.array(pool_by_replica, np.int64),
            until_s=until_s,
        )

    def _taken_iterations(
        self, replicas: Sequence[Replica], pool_by_replica: list[int]
    ) -> tuple[Table, SpeculationRecord | None, Table, Gaps]:
        """Takes the iterations since the last chunk: own gaps, drafts, iterations and all gaps."""
        logs: list[IterationLog] = [replica.recorder.iterations.cut() for replica in replicas]
        own_gaps = own_gaps_table(logs)
        speculation = speculation_record(logs, pool_by_replica)
        if speculation is not None:
            self._count(speculation.acceptance)
        columns, gaps = joined_iterations(logs)
        return own_gaps, speculation, Table(columns), gaps

    def _count(self, acceptance: AnyTable) -> None:
        """Adds the draft tokens of a chunk to the run's counts: see `SpeculationRecord.acceptance`."""
        parts = [acceptance] if self._acceptance is None else [self._acceptance, acceptance]
        self._acceptance = added_acceptance(parts)


def _taken_unfilled(run: RecordedRun) -> NDArray[np.int64] | None:
    """Takes the rows of `RunRecords.unfilled` since the last chunk; None if no KV is reserved ahead."""
    found = []
    for replica in run.fleet.replicas:
        pool, lost = replica.core.block_pool, replica.recorder.lost_engines
        own = [engine.unfilled for engine in lost]
        if pool.unfilled is not None:
            own.append(np.array(pool.unfilled, np.int64).reshape(-1, 3))
            del pool.unfilled[:]
        lost[:] = [
            engine if engine.unfilled is None else engine._replace(unfilled=engine.unfilled[:0])
            for engine in lost
        ]
        found += [np.insert(rows, 0, replica.index, axis=1) for rows in own if rows is not None]
    return np.concatenate(found) if found else None


def _unfilled_since(run: RecordedRun) -> NDArray[np.int64]:
    """Returns `RecordChunk.unfilled_since`."""
    return np.array([replica.core.block_pool.unfilled_since for replica in run.fleet.replicas], np.int64)
