"""Merges the records of shards into the records of the whole run, bit-identically.

A run of one process has its iterations, events and gaps replica by replica, and its requests by id. The
shards have consecutive replicas, so their tables are concatenated, and the requests are sorted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.records.run import RunRecords
from sim.records.table import AnyTable, Table, column, joined
from sim.shards.shard import ShardRecords
from sim.speculation.log import SpeculationRecord, added_acceptance


def merged(shards: Sequence[ShardRecords], until_s: float | None = None) -> RunRecords:
    """Returns the records of the whole run. shards: all shards, by replica. until_s: end of the run, if any.

    The shards' records are dropped table by table, because both together would need twice the memory.
    """
    parts = [shard.records for shard in shards]
    end_s = _end_s(shards, until_s)
    unfilled = [part.unfilled for part in parts if part.unfilled is not None]
    first = parts[0]
    return RunRecords(
        requests=_requests([part.requests for part in parts]),
        iterations=joined([part.iterations for part in parts]),
        gap_s=np.concatenate([part.gap_s for part in parts]),
        gap_count=np.concatenate([part.gap_count for part in parts]),
        gap_end_s=np.concatenate([part.gap_end_s for part in parts]),
        pools=first.pools,
        replicas=tuple(replica._replace(end_s=end_s) for replica in first.replicas),
        end_s=end_s,
        interrupted=any(part.interrupted for part in parts),
        events=joined([part.events for part in parts]),
        own_gaps=joined([part.own_gaps for part in parts]),
        num_evicted_blocks=sum(part.num_evicted_blocks for part in parts),
        num_discarded_tokens=sum(part.num_discarded_tokens for part in parts),
        pinned_token_s=sum(pinned.token_s_until(end_s) for shard in shards for pinned in shard.pinned),
        unfilled=np.concatenate(unfilled) if len(unfilled) == len(parts) else None,
        num_lost_first_tokens=sum(part.num_lost_first_tokens for part in parts),
        failed_attempts=_counted(parts),
        adapters=[counts for part in parts for counts in part.adapters],
        speculation=_speculation(parts),
    )


def _end_s(shards: Sequence[ShardRecords], until_s: float | None) -> float:
    """Returns the end of the whole run: until_s if a shard has unfinished requests, else the last end."""
    if any(shard.has_more for shard in shards):
        return max(shard.records.end_s for shard in shards) if until_s is None else until_s
    return max(shard.last_end_s for shard in shards)


def _requests(tables: Sequence[AnyTable]) -> Table:
    """Returns the rows of all tables by request id."""
    ids = np.concatenate([column(table, "request_id") for table in tables])
    order = np.argsort(ids)
    return joined(tables).take(order)


def _counted(parts: Sequence[RunRecords]) -> dict[str, int]:
    """Returns the sums of the failed attempts, by reason."""
    reasons = dict.fromkeys(reason for part in parts for reason in part.failed_attempts)
    return {reason: sum(part.failed_attempts.get(reason, 0) for part in parts) for reason in reasons}


def _speculation(parts: Sequence[RunRecords]) -> SpeculationRecord | None:
    """Returns the speculation of all replicas; None if none speculates."""
    found = [part.speculation for part in parts if part.speculation is not None]
    if not found:
        return None
    return SpeculationRecord(
        acceptance=added_acceptance([one.acceptance for one in found]),
        bursts=joined([one.bursts for one in found]),
    )
