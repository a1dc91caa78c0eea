"""The records of a shard as the bytes of one file: a zip archive of Parquet tables and one JSON text.

Reading a file executes nothing that is in it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from io import BytesIO
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import pandas as pd

from policies.adapters.residents import AdapterCounts
from sim.records.run import PoolRecord, ReplicaRecord, RunRecords
from sim.shards.shard import ShardRecords
from sim.speculation.records import SpeculationRecord
from sim.workload.base import WorkloadNotes

TABLES = ("requests", "iterations", "events", "own_gaps")
GAPS = ("gap_s", "gap_count", "gap_end_s")
COUNTS = ("num_evicted_blocks", "num_discarded_tokens", "num_lost_first_tokens")
PLAIN = "shard.json"


class DamagedShardError(ValueError):
    """The file of a shard cannot be read."""


def shard_bytes(shard: ShardRecords, notes: WorkloadNotes) -> bytes:
    """Returns the content of the file of a shard. notes: those of the traffic of the whole run."""
    records = shard.records
    tables = {name: getattr(records, name) for name in TABLES}
    tables["gaps"] = pd.DataFrame({name: getattr(records, name) for name in GAPS})
    if records.unfilled is not None:
        tables["unfilled"] = pd.DataFrame(dict(zip("abcd", records.unfilled.T, strict=True)))
    if records.speculation is not None:
        tables["acceptance"] = records.speculation.acceptance
        tables["bursts"] = records.speculation.bursts
    plain = {
        "last_end_s": shard.last_end_s,
        "has_more": shard.has_more,
        "end_s": records.end_s,
        "pools": [pool._asdict() for pool in records.pools],
        "replicas": [replica.pool for replica in records.replicas],
        "failed_attempts": dict(records.failed_attempts),
        "adapters": [
            {name: getattr(one, name) for name in AdapterCounts.__slots__} for one in records.adapters
        ],
        "notes": asdict(notes),
        **{name: getattr(records, name) for name in COUNTS},
    }
    content = BytesIO()
    with ZipFile(content, "w") as archive:
        for name, table in tables.items():
            with archive.open(f"{name}.parquet", "w") as file:
                table.to_parquet(file, index=False, compression="lz4")
        archive.writestr(PLAIN, json.dumps(plain))
    return content.getvalue()


def read_shard(content: bytes) -> tuple[ShardRecords, WorkloadNotes]:
    """Returns what `shard_bytes` was given. Raises DamagedShardError."""
    try:
        with ZipFile(BytesIO(content)) as archive:
            plain: dict[str, Any] = json.loads(archive.read(PLAIN))
            tables = {
                name.removesuffix(".parquet"): pd.read_parquet(BytesIO(archive.read(name)))
                for name in archive.namelist()
                if name != PLAIN
            }
        return _records(plain, tables), WorkloadNotes(**plain["notes"])
    except (BadZipFile, KeyError, TypeError, ValueError, OSError) as error:
        raise DamagedShardError(str(error)) from error


def _records(plain: dict[str, Any], tables: dict[str, pd.DataFrame]) -> ShardRecords:
    end_s, gaps = plain["end_s"], tables["gaps"]
    same: dict[str, Any] = {name: tables[name] for name in TABLES}
    same |= {name: gaps[name].to_numpy() for name in GAPS}
    same |= {name: plain[name] for name in COUNTS}
    records = RunRecords(
        **same,
        pools=tuple(PoolRecord(**pool) for pool in plain["pools"]),
        replicas=tuple(ReplicaRecord(pool, 0.0, end_s) for pool in plain["replicas"]),
        end_s=end_s,
        failed_attempts=plain["failed_attempts"],
        adapters=[_counts(one) for one in plain["adapters"]],
        unfilled=tables["unfilled"].to_numpy(np.int64) if "unfilled" in tables else None,
        speculation=SpeculationRecord(acceptance=tables["acceptance"], bursts=tables["bursts"])
        if "bursts" in tables
        else None,
    )
    return ShardRecords(records=records, last_end_s=plain["last_end_s"], has_more=plain["has_more"])


def _counts(plain: dict[str, Any]) -> AdapterCounts:
    counts = AdapterCounts()
    for name in AdapterCounts.__slots__:
        setattr(counts, name, plain[name])
    return counts
