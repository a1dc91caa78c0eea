"""What a run leaves behind: the records of its requests, iterations, engines, pools and links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from policies.adapters.residents import AdapterCounts
from policies.core.engine import EngineCore
from sim.records.event_rows import logged_events
from sim.records.failure import Failure
from sim.records.iterations import own_gaps_table


class Overload(NamedTuple):
    """The evidence on which an overloaded run was stopped early."""

    at_s: float
    since_s: float
    """The rates are of the time from then on."""
    arrivals_per_s: float
    ends_per_s: float
    outstanding: int
    growth_per_s: float
    """Of the outstanding requests, and the least that it is with 99.9 % confidence."""
    least_growth_per_s: float


class MissedSlo(NamedTuple):
    """The evidence on which a run was stopped early because its SLO was out of reach."""

    at_s: float
    missed: int
    """Requests that are certain to miss the SLO."""
    allowed: int
    requests: int
    """That were to come in all."""


class EngineRecord(NamedTuple):
    """Figures of one engine; a replica has a new engine after each crash."""

    pinned_token_s: float
    num_evicted: int
    unfilled: NDArray[np.int64] | None
    """As `BlockPool.unfilled`, [n, 3]."""
    adapters: AdapterCounts | None

    @classmethod
    def of(cls, core: EngineCore, end_s: float) -> EngineRecord:
        """The figures of an engine that ended at end_s, in seconds."""
        pool, residents = core.block_pool, core.residents
        unfilled = None if pool.unfilled is None else np.array(pool.unfilled, np.int64).reshape(-1, 3)
        counts = None if residents is None else residents.counts
        return cls(pool.pinned_token_s_until(end_s), pool.num_evicted, unfilled, counts)


class PoolRecord(NamedTuple):
    """What the replicas of a pool have in common."""

    num_kv_blocks: int
    """Of each."""
    block_size: int
    kv_bytes_per_token: float = 0.0
    name: str = ""


class ReplicaRecord(NamedTuple):
    """The pool that a replica belongs to, for how long it was paid, and when it served."""

    pool: int
    start_s: float
    end_s: float
    ready_s: float | None = 0.0
    """From when on it took requests; None: it never did."""
    drain_s: float | None = None
    """From when on it was not wanted any more; None: to the end."""
    down: tuple[tuple[float, float], ...] = ()
    """From when until when, after each crash."""


class RecoveryRecord(NamedTuple):
    """What was done to go on with requests whose replica had crashed. Tokens and bytes are those of KV."""

    num_resumed: int = 0
    """Times that a request went on where it was."""
    num_recomputed_tokens: int = 0
    """Lost in crashes, and computed a second time, whoever began again or went on."""
    replicated_bytes: float = 0.0
    """Copied to the host memory of other replicas."""
    num_restored_tokens: int = 0
    restored_bytes: float = 0.0


class LinkRecord(NamedTuple):
    """What KV has travelled on: a port in one direction, or a switch."""

    name: str
    bytes_per_s: float
    carried_bytes: float


def replicas_throughout(num_replicas: int, end_s: float) -> tuple[ReplicaRecord, ...]:
    """Replicas of the first pool that are there for the whole run."""
    return (ReplicaRecord(0, 0.0, end_s),) * num_replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecords:
    """All that a run leaves, from which every metric is computed.

    requests: RequestLog.table(). iterations: one row an iteration, by (replica, iteration); start_s and
    duration_s in seconds, the fields of IterationShape, sequences running and waiting at the plan, KV blocks
    and tokens held at the iteration's end, sequences preempted by the plan. replicas: by index, all that
    there ever were. unfilled: where KV is reserved ahead, `BlockPool.unfilled` of all replicas, [n, 4]:
    replica, first iteration, iteration behind the last, token places; else None.
    interrupted: the run was stopped by hand at end_s. overload, missed: why it was ended early there,
    if it was. events: `sim.records.event_rows.logged_events`.
    own_gaps: between two tokens of one request where these did not come at two iterations with decodes, one
    behind the other, of one replica: request_id, replica, since_s, end_s. All others do, see `token_times`.
    pinned_token_s: tokens of pinned prefixes times the seconds for which they were kept.
    num_evicted_blocks: KV blocks whose content was given up for another, of all replicas and the whole run.
    num_lost_first_tokens: of answers in vain, which their requests' rows do not count. num_crash_tokens: of
    the tokens lost, those lost in crashes. failures: those that happened. num_resends: requests sent again by
    the service. failed_attempts: number of client attempts that were refused, timed out or lost, by reason.
    recovery: of those whose replica crashed. links: between replicas, those that KV was sent over.
    adapters: what those of each replica did; empty where none are served.
    """

    requests: pd.DataFrame
    iterations: pd.DataFrame
    gap_s: NDArray[np.float64]
    gap_count: NDArray[np.int64]
    gap_end_s: NDArray[np.float64]
    pools: tuple[PoolRecord, ...]
    replicas: tuple[ReplicaRecord, ...]
    end_s: float
    interrupted: bool = False
    overload: Overload | None = None
    missed: MissedSlo | None = None
    events: pd.DataFrame = field(default_factory=lambda: logged_events([]))
    own_gaps: pd.DataFrame = field(default_factory=lambda: own_gaps_table([]))
    num_evicted_blocks: int = 0
    pinned_token_s: float = 0.0
    unfilled: NDArray[np.int64] | None = None
    num_lost_first_tokens: int = 0
    num_crash_tokens: int = 0
    failures: tuple[Failure, ...] = ()
    num_resends: int = 0
    failed_attempts: Mapping[str, int] = field(default_factory=dict)
    recovery: RecoveryRecord = field(default_factory=RecoveryRecord)
    links: tuple[LinkRecord, ...] = ()
    adapters: Iterable[AdapterCounts] = ()

    @property
    def num_replicas(self) -> int:
        """All that there ever were."""
        return len(self.replicas)

    @property
    def pool_by_replica(self) -> NDArray[np.int64]:
        """Index of each replica's pool."""
        return np.array([replica.pool for replica in self.replicas], np.int64)

    def by_replica(self, name: str) -> NDArray[np.float64]:
        """A figure of `PoolRecord` for each replica."""
        values = np.array([getattr(pool, name) for pool in self.pools], np.float64)
        return values[self.pool_by_replica]

    def rows_by_pool(self) -> list[NDArray[np.bool_] | slice]:
        """Of each pool, which rows of `iterations` are its own."""
        if len(self.pools) == 1:
            return [slice(None)]
        pool = self.pool_by_replica[self.iterations["replica"].to_numpy()]
        return [pool == index for index in range(len(self.pools))]
