"""The records of a run, complete or in chunks: requests, iterations, engines, pools, links, events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.adapters.serving import AdapterCounts
from policies.core.engine import EngineCore
from sim.records.event_rows import TIERS, WAIT_COLUMNS, Event, logged_events
from sim.records.iterations import IterationLog
from sim.records.table import AnyTable, Gaps, Table, column, joined, to_pandas
from sim.speculation.log import SpeculationRecord


class FailureKind(Enum):
    """The kind of a failure of a replica."""

    crash = "crash"
    """Its process or machine fails and loses all KV; it serves again after duration_s."""
    straggler = "straggler"
    """Its iterations take `factor` times as long: a hot or throttled GPU."""
    link_down = "link_down"
    """Its link is lost; it continues its current requests."""
    link_slow = "link_slow"
    """Its transfers take `factor` times as long."""
    host_out_of_memory = "host_out_of_memory"
    """Its host runs out of memory: the content of host memory and the process are lost, as in a crash."""

    @property
    def has_factor(self) -> bool:
        return self in (FailureKind.straggler, FailureKind.link_slow)


class Failure(NamedTuple):
    """One failure of a replica, from at_s for duration_s, in seconds. Sorted by time, replica, event."""

    at_s: float
    replica: int
    event: int  # index of the event in the settings
    kind: FailureKind
    duration_s: float
    factor: float = 1.0  # on durations


class Outcome(IntEnum):
    """The outcome of a migration; all except the first leave the request where it was."""

    moved = 0
    no_room = 1  # the other replica had no slot or no blocks
    preempted = 2  # the request was preempted while its KV was copied
    ended = 3  # the request ended, or its client aborted it
    too_long = 4  # after the last allowed stage, too much KV was left for a final stage


class MigrationRecord(NamedTuple):
    """One migration. Times in seconds; NaN for events that did not occur."""

    request_id: int
    source: int
    target: int
    began_s: float
    """Time of the decision."""
    stopped_s: float
    """Time at which the request stopped on the source."""
    resumed_s: float
    """Time at which the first iteration with it on the target began."""
    ended_s: float
    """Time at which the last byte had arrived, or at which the migration was given up."""
    num_stages: int
    num_bytes: float
    """Bytes of KV that were copied."""
    outcome: Outcome


class Overload(NamedTuple):
    """The evidence for stopping an overloaded run early."""

    at_s: float
    since_s: float
    """Start of the period to which the rates refer, s."""
    arrivals_per_s: float
    ends_per_s: float
    outstanding: int
    growth_per_s: float
    """Growth of the number of outstanding requests, per second."""
    least_growth_per_s: float
    """Lower bound of growth_per_s with 99.9 % confidence."""


class MissedSlo(NamedTuple):
    """The evidence for stopping a run early because its SLO was out of reach."""

    at_s: float
    missed: int
    """Requests that are certain to miss the SLO."""
    allowed: int
    requests: int
    """Number of requests of the whole run."""


class EngineRecord(NamedTuple):
    """Metrics of one engine; a replica has a new engine after each crash."""

    pinned_token_s: float
    num_evicted: int
    num_discarded: int
    unfilled: NDArray[np.int64] | None
    """See `BlockPool.unfilled`. [n, 3]"""
    adapters: AdapterCounts | None

    @classmethod
    def of(cls, core: EngineCore, end_s: float) -> EngineRecord:
        """Returns the metrics of an engine at end_s (in seconds)."""
        pool, residents = core.block_pool, core.residents
        unfilled = None if pool.unfilled is None else np.array(pool.unfilled, np.int64).reshape(-1, 3)
        counts = None if residents is None else residents.counts
        pinned_token_s = pool.pinned_time.token_s_until(end_s)
        return cls(pinned_token_s, pool.num_evicted, core.num_discarded, unfilled, counts)


class PoolRecord(NamedTuple):
    """The common properties of the replicas of a pool."""

    num_kv_blocks: int
    """KV blocks of each replica."""
    block_size: int
    kv_bytes_per_token: float = 0.0
    name: str = ""


class ReplicaRecord(NamedTuple):
    """The pool of a replica, the time for which it was paid, and the times at which it served, in seconds."""

    pool: int
    start_s: float
    end_s: float
    ready_s: float | None = 0.0
    """Time at which it began to accept requests; None: never."""
    drain_s: float | None = None
    """Time at which it was drained; None: never."""
    down: tuple[tuple[float, float], ...] = ()
    """Start and end of each downtime."""


class RecoveryRecord(NamedTuple):
    """Work of the recovery of requests after crashes. Tokens and bytes are those of KV."""

    num_resumed: int = 0
    """Number of times that a request continued after its streamed tokens."""
    num_recomputed_tokens: int = 0
    """Tokens lost in crashes and recomputed, whether the request continued or restarted."""
    replicated_bytes: float = 0.0
    """Bytes copied to the host memory of other replicas."""
    num_restored_tokens: int = 0
    restored_bytes: float = 0.0


class LinkRecord(NamedTuple):
    """A link over which KV was sent: a port in one direction, or a switch."""

    name: str
    bytes_per_s: float
    carried_bytes: float


def replicas_throughout(num_replicas: int, end_s: float) -> tuple[ReplicaRecord, ...]:
    """Returns the records of replicas of the first pool that serve for the whole run."""
    return (ReplicaRecord(0, 0.0, end_s),) * num_replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecords:
    """All records of a run, from which every metric is computed.

    Tables are `Table`s, or pandas frames if requested (`in_pandas`) or read from files. requests: see
    `RequestLog.table`.
    iterations: one row per iteration, by (replica, iteration); start_s and duration_s in seconds, the fields
      of IterationShape, sequences running and waiting after the plan, KV blocks and tokens held at the end of
      the iteration, sequences preempted by the plan.
    replicas: all replicas of the run, by index.
    unfilled: if KV is reserved ahead, `BlockPool.unfilled` of all replicas, [n, 4]: replica, first iteration,
      iteration after the last, unused token slots; else None.
    interrupted: whether the run was stopped by Ctrl-C at end_s.
    overload, missed: the evidence for stopping the run early at end_s; None: it was not stopped. events: see
    `sim.records.event_rows.logged_events`.
    own_gaps: the gaps between two tokens of a request that are not between consecutive decode iterations of
    one replica: request_id, replica, since_s, end_s. For the others see `token_times`.
    pinned_token_s: tokens of pinned prefixes times the seconds for which they were kept.
    num_evicted_blocks: cached KV blocks that were evicted, over all replicas.
    num_discarded_tokens: tokens that engines with asynchronous scheduling computed after stop tokens.
    num_lost_first_tokens: first tokens of lost attempts, which the rows of requests do not count.
    num_crash_tokens: output tokens lost in crashes. failures: the failures that occurred.
    num_resends: number of times that the gateway resent a request.
    failed_attempts: number of client attempts that were refused, timed out or lost, by reason.
    recovery: the recovery of requests after crashes.
    links: the links between replicas over which KV was sent.
    migrations: the live migrations that have ended; None: the run has no migration policy.
    adapters: counts of the adapters of each replica; empty if no adapters are served.
    speculation: acceptance by place and the bursts of requests; None if no replica speculates.
    """

    requests: AnyTable
    iterations: AnyTable
    gap_s: NDArray[np.float64]
    gap_count: NDArray[np.int64]
    gap_end_s: NDArray[np.float64]
    pools: tuple[PoolRecord, ...]
    replicas: tuple[ReplicaRecord, ...]
    end_s: float
    interrupted: bool = False
    overload: Overload | None = None
    missed: MissedSlo | None = None
    events: AnyTable = field(default_factory=lambda: logged_events([]))
    own_gaps: AnyTable = field(default_factory=lambda: own_gaps_table([]))
    num_evicted_blocks: int = 0
    num_discarded_tokens: int = 0
    pinned_token_s: float = 0.0
    unfilled: NDArray[np.int64] | None = None
    num_lost_first_tokens: int = 0
    num_crash_tokens: int = 0
    failures: tuple[Failure, ...] = ()
    num_resends: int = 0
    failed_attempts: Mapping[str, int] = field(default_factory=dict)
    recovery: RecoveryRecord = field(default_factory=RecoveryRecord)
    links: tuple[LinkRecord, ...] = ()
    migrations: tuple[MigrationRecord, ...] | None = None
    adapters: Iterable[AdapterCounts] = ()
    speculation: SpeculationRecord | None = None

    def in_pandas(self) -> RunRecords:
        """Returns the records with pandas frames for tables, for users and their calculations."""
        speculation = self.speculation
        if speculation is not None:
            speculation = replace(
                speculation,
                acceptance=to_pandas(speculation.acceptance),
                bursts=to_pandas(speculation.bursts),
            )
        return replace(
            self,
            requests=to_pandas(self.requests),
            iterations=to_pandas(self.iterations),
            events=to_pandas(self.events),
            own_gaps=to_pandas(self.own_gaps),
            speculation=speculation,
        )

    @property
    def bursts(self) -> AnyTable | None:
        """The bursts of `SpeculationRecord`; None if no replica speculates."""
        return None if self.speculation is None else self.speculation.bursts

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the run, including stopped ones."""
        return len(self.replicas)

    @property
    def pool_by_replica(self) -> NDArray[np.int64]:
        """Index of the pool of each replica, with shape [R]."""
        return np.array([replica.pool for replica in self.replicas], np.int64)


GROUP_ROWS: Final = 1 << 16
"""Requests of a group: group k has the ids from k * GROUP_ROWS to (k + 1) * GROUP_ROWS - 1.

The rows of a group are passed on together when all its requests have ended, so the parts of the requests
table do not depend on the times at which a run was divided.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordChunk:
    """The records of a run since the previous chunk, or all of them; all chunks together are `RunRecords`.

    The tables and arrays have the columns and dtypes of the same fields of `RunRecords`, and every row is in
    exactly one chunk. The rows of a chunk depend on the times at which the run was divided, so metrics must
    not depend on them.

    requests: the complete groups (see `GROUP_ROWS`) since the previous chunk, by request id; ids ascend from
    chunk to chunk. The last chunk has the rest, including the unfinished requests.
    iterations: by (replica, iteration), of all replicas; the first iteration of a replica follows the last
    one of earlier chunks. Steps that run at the time of the division are in a later chunk, so an iteration
    that ended before until_s may be in a later chunk.
    gap_s, gap_count, gap_end_s: the gaps of these iterations and of `own_gaps`, in any order.
    own_gaps, events, bursts: rows logged since the previous chunk. The rows of a request are in the chunk
      of its row of `requests` or in earlier ones. bursts: None if no replica speculates.
    unfilled: as `RunRecords.unfilled`. The range of iterations of a row may begin in earlier chunks; its last
      iteration is in this chunk or an earlier one.
    unfilled_since: for each replica, the earliest first iteration of `unfilled` rows in later chunks, [R];
    None: unknown, or no KV is reserved ahead. pool_by_replica: as `RunRecords.pool_by_replica`, for the
    replicas of the run so far. until_s: the last end of a request before the division, s; the run does not
    end before it. later_since_s: earliest time at which a request of a later chunk may have got a token, s;
    -inf: unknown. iterations_since_s: earliest time at which an iteration of a later chunk may begin, s;
    -inf: unknown. own_s: latencies of `requests` that the SLO limits and only the workload can compute, by
    name, s: see `sim.metrics.workload.OwnLatencies`. end: in the last chunk, the records of the whole run
    with tables without rows, for all other fields; otherwise None. `end.speculation.acceptance` is that of
    the whole run.
    """

    requests: AnyTable
    iterations: AnyTable
    gap_s: NDArray[np.float64]
    gap_count: NDArray[np.int64]
    gap_end_s: NDArray[np.float64]
    own_gaps: AnyTable
    events: AnyTable
    bursts: AnyTable | None
    unfilled: NDArray[np.int64] | None
    pool_by_replica: NDArray[np.int64]
    until_s: float
    unfilled_since: NDArray[np.int64] | None = None
    later_since_s: float = -np.inf
    iterations_since_s: float = -np.inf
    own_s: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    end: RunRecords | None = None

    @classmethod
    def of(cls, records: RunRecords, *, ends: bool = True) -> RecordChunk:
        """Returns all records as one chunk. ends: whether the run ends with it; False for a shard."""
        return cls(
            requests=records.requests,
            iterations=records.iterations,
            gap_s=records.gap_s,
            gap_count=records.gap_count,
            gap_end_s=records.gap_end_s,
            own_gaps=records.own_gaps,
            events=records.events,
            bursts=records.bursts,
            unfilled=records.unfilled,
            pool_by_replica=records.pool_by_replica,
            until_s=records.end_s,
            end=records if ends else None,
        )


def without_rows(records: RunRecords) -> RunRecords:
    """Returns the records with tables without rows."""
    speculation = records.speculation
    return replace(
        records,
        requests=records.requests[:0],
        iterations=records.iterations[:0],
        gap_s=records.gap_s[:0],
        gap_count=records.gap_count[:0],
        gap_end_s=records.gap_end_s[:0],
        own_gaps=records.own_gaps[:0],
        events=records.events[:0],
        unfilled=None if records.unfilled is None else records.unfilled[:0],
        speculation=None if speculation is None else replace(speculation, bursts=speculation.bursts[:0]),
    )


def own_gaps_table(logs: list[IterationLog]) -> Table:
    """Returns the table of the gaps logged by add_gap, of all replicas: see `RunRecords.own_gaps`."""
    gaps = [log.own_gaps() for log in logs]
    request_id, since_s, end_s = np.concatenate(gaps or [np.empty((0, 3))]).T
    replica = np.repeat([log.replica for log in logs], [len(own) for own in gaps])
    return Table(
        {
            "request_id": request_id.astype(np.int64),
            "replica": replica.astype(np.int32),
            "since_s": since_s,
            "end_s": end_s,
        }
    )


def expanded(logs: list[IterationLog]) -> tuple[dict[str, NDArray[Any]], Gaps]:
    """Returns columns with one value per iteration, and all gaps between tokens, replica after replica.

    A value that an engine does not have, such as adapters, is 0. The logs are removed from the list.
    """
    num_rows, max_gaps = sum(log.num_iterations for log in logs), sum(log.max_gaps for log in logs)
    dtypes = IterationLog.dtypes()
    for log in logs:
        dtypes |= log.more_dtypes()
    columns: dict[str, NDArray[Any]] = {name: np.zeros(num_rows, dtype) for name, dtype in dtypes.items()}
    gaps = Gaps(np.empty(max_gaps), np.empty(max_gaps, np.int64), np.empty(max_gaps))
    row = num_gaps = 0
    logs.reverse()
    while logs:
        log = logs.pop()
        end = row + log.num_iterations
        own = {name: column[row:end] for name, column in columns.items()}
        num_gaps += log.expand(own, gaps.part(num_gaps, max_gaps))
        row = end
    return columns, gaps.part(0, num_gaps)


def joined_iterations(logs: list[IterationLog]) -> tuple[dict[str, NDArray[Any]], Gaps]:
    """Returns the same as `expanded`, with the gaps in a different order. The logs are dropped.

    All logs are expanded at once, which makes a thousand small logs a thousand times cheaper.
    """
    kinds = {(log.block_size, log.serves_adapters, log.drafts is None) for log in logs}
    if len(kinds) != 1 or logs[0].drafts is not None:  # the passes of each refer to its own iterations
        return expanded(logs)
    joined = IterationLog(0, logs[0].block_size, logs[0].serves_adapters)
    sizes = np.array([log.num_iterations for log in logs])
    for log in logs:
        joined.extend(log)
    columns, gaps = expanded([joined])
    begin = np.cumsum(sizes) - sizes
    columns["replica"][:] = np.repeat([log.replica for log in logs], sizes)
    columns["iteration"] += np.repeat([log.first_iteration for log in logs] - begin, sizes).astype(np.int32)
    logs.clear()
    return columns, gaps


_COUNTS: Final = ("tokens", "of_tokens", "recomputed_tokens", "by")


def events_table(records: RunRecords) -> Table:
    """Returns one row per event, by time: the logged events, and arrival, first token and end of requests.

    Columns: time_s, request_id (-1: no sequence), replica, event (a name of `Event`), tier, and the counts
    and waits that `Event` and `WAIT_COLUMNS` define; a wait is in the row of the event that ends it.
    """
    requests, logged = records.requests, records.events
    parts = [
        _of_requests(requests, Event.arrive, "arrival_s", "prompt_tokens"),
        _of_requests(requests, Event.first_token, "first_token_s"),
        logged,
        _of_requests(requests, Event.end, "finished_s", "output_tokens"),
    ]
    table = joined(parts)  # the order at equal times
    table = table.take(np.lexsort((table["request_id"], table["time_s"])))
    names = np.array([event.name for event in Event], dtype=object)
    return Table(
        {
            **{name: table[name] for name in ("time_s", "request_id", "replica")},
            "event": names[table["event"]],
            "tier": np.array(TIERS, dtype=object)[table["tier"]],
            **{name: table[name].astype(np.int64) for name in _COUNTS},
            **{name: table[name] for name in WAIT_COLUMNS},
        }
    )


def _of_requests(requests: AnyTable, event: Event, name: str, counted: str | None = None) -> Table:
    """Returns a row of an event for each request that has its time. counted: the column of its tokens."""
    time_s = column(requests, name, np.float64)
    happened = np.flatnonzero(~np.isnan(time_s))
    return Table(
        {
            "replica": column(requests, "replica")[happened],
            "time_s": time_s[happened],
            "request_id": column(requests, "request_id")[happened],
            "event": np.full(len(happened), event, np.int8),
            "tokens": np.ones(len(happened), np.int64)
            if counted is None
            else column(requests, counted)[happened],
            "by": np.full(len(happened), -1),
        }
    )
