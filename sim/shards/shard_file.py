"""The records of a shard as the bytes of one file: a zip archive of Parquet tables and one JSON text.

Reading a file executes none of its content.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np
import pyarrow.parquet as pq

from policies.adapters.serving import AdapterCounts
from policies.caching.runs import PinnedTime
from sim.records.parquet import of_arrow, parquet_bytes
from sim.records.run import PoolRecord, ReplicaRecord, RunRecords
from sim.records.table import Table
from sim.shards.shard import ShardRecords
from sim.speculation.log import SpeculationRecord
from sim.workload.base import WorkloadNotes

TABLES = ("requests", "iterations", "events", "own_gaps")
GAPS = ("gap_s", "gap_count", "gap_end_s")
UNFILLED = ("a", "b", "c", "d")
"""Columns of `RunRecords.unfilled` in the file."""
COUNTS = ("num_evicted_blocks", "num_discarded_tokens", "num_lost_first_tokens")
PLAIN = "shard.json"
CHECKED_BYTES = 1 << 20
"""Number of bytes of a file that are checked at once."""


class DamagedShardError(ValueError):
    """The file of a shard cannot be read."""


def shard_bytes(
    shard: ShardRecords, notes: WorkloadNotes, parts: Mapping[str, bytes] = MappingProxyType({})
) -> bytes:
    """Returns the content of the file of a shard. notes: the notes on the traffic of the whole run.

    parts: additional content by name, for a shard whose tables have no rows.
    """
    records = shard.records
    tables = {name: getattr(records, name) for name in TABLES}
    tables["gaps"] = Table({name: getattr(records, name) for name in GAPS})
    if records.unfilled is not None:
        tables["unfilled"] = Table(dict(zip(UNFILLED, records.unfilled.T, strict=True)))
    if records.speculation is not None:
        tables["acceptance"] = records.speculation.acceptance
        tables["bursts"] = records.speculation.bursts
    plain = {
        "last_end_s": shard.last_end_s,
        "has_more": shard.has_more,
        "pinned": shard.pinned if any(each != PinnedTime() for each in shard.pinned) else (),
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
            archive.writestr(f"{name}.parquet", parquet_bytes(table, "lz4"))
        archive.writestr(PLAIN, json.dumps(plain))
        for name, part in parts.items():
            archive.writestr(name, part)
    return content.getvalue()


class ShardMember(NamedTuple):
    """The content of a closed shard file. file: its path, or the complete file in memory."""

    file: Path | IO[bytes]
    name: str

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Opens the content, to read from any place in it."""
        with ZipFile(self.file) as archive, archive.open(self.name) as content:
            yield content


class ShardFile:
    """The open file of a shard. Raises DamagedShardError."""

    def __init__(self, file: Path | IO[bytes]) -> None:
        self._file = file
        with _damage_reported():
            self._archive = ZipFile(file)

    def records(self) -> tuple[ShardRecords, WorkloadNotes]:
        """Returns the records and the notes."""
        archive = self._archive
        with _damage_reported():
            plain: dict[str, Any] = json.loads(archive.read(PLAIN))
            tables = {
                name.removesuffix(".parquet"): of_arrow(pq.read_table(BytesIO(archive.read(name))))
                for name in archive.namelist()
                if name.endswith(".parquet")
            }
            return _records(plain, tables), WorkloadNotes(**plain["notes"])

    @property
    def names(self) -> Collection[str]:
        """Returns the names of the members."""
        return self._archive.namelist()

    def part(self, name: str) -> bytes:
        """Returns the content of a member that is not a table of the shard."""
        with _damage_reported():
            return self._archive.read(name)

    def member(self, name: str) -> ShardMember:
        """Checks additional content; returns it so that it can be opened after this file is closed."""
        with _damage_reported(), self._archive.open(name) as whole:
            while whole.read(CHECKED_BYTES):  # compares the checksum at the end
                pass
        return ShardMember(self._file, name)

    def close(self) -> None:
        """Closes the file of the shard."""
        self._archive.close()


@contextmanager
def _damage_reported() -> Iterator[None]:
    """Converts the errors of readers to DamagedShardError."""
    try:
        yield
    except (BadZipFile, KeyError, TypeError, ValueError, OSError) as error:
        raise DamagedShardError(str(error)) from error


def _records(plain: dict[str, Any], tables: dict[str, Table]) -> ShardRecords:
    end_s, gaps = plain["end_s"], tables["gaps"]
    same: dict[str, Any] = {name: tables[name] for name in TABLES}
    same |= {name: gaps[name] for name in GAPS}
    same |= {name: plain[name] for name in COUNTS}
    records = RunRecords(
        **same,
        pools=tuple(PoolRecord(**pool) for pool in plain["pools"]),
        replicas=tuple(ReplicaRecord(pool, 0.0, end_s) for pool in plain["replicas"]),
        end_s=end_s,
        failed_attempts=plain["failed_attempts"],
        adapters=[_counts(one) for one in plain["adapters"]],
        unfilled=np.stack([tables["unfilled"][name] for name in "abcd"], axis=1)
        if "unfilled" in tables
        else None,
        speculation=SpeculationRecord(acceptance=tables["acceptance"], bursts=tables["bursts"])
        if "bursts" in tables
        else None,
    )
    pinned = tuple(PinnedTime(token_s, tuple(map(tuple, kept))) for token_s, kept in plain["pinned"])
    return ShardRecords(
        records=records, last_end_s=plain["last_end_s"], has_more=plain["has_more"], pinned=pinned
    )


def _counts(plain: dict[str, Any]) -> AdapterCounts:
    counts = AdapterCounts()
    for name in AdapterCounts.__slots__:
        setattr(counts, name, plain[name])
    return counts
