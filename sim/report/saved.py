"""Saves and reads the records that figures need besides the tables of a run.

itl.parquet: every gap between two tokens (seconds, number of sequences, end), including the gaps of single
requests that gaps.parquet has.
records.json: pools, replicas and the end of the run.
If replicas speculate, also acceptance.parquet, one row per pool and place of a draft token, and
bursts.parquet, one row per pass that kept draft tokens.
With these files and the tables, the report can be written again without a simulation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sim.metrics.features import acceptance_by_pool
from sim.records.run import PoolRecord, ReplicaRecord, RunRecords
from sim.records.table import AnyTable, Table, column
from sim.speculation.log import SpeculationRecord

GAPS, RECORDS = "itl.parquet", "records.json"
ACCEPTANCE, BURSTS = "acceptance.parquet", "bursts.parquet"
SPECULATES = "speculates"
"""Key of records.json for runs with these two tables."""


def saved_records(records: RunRecords) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of the files."""
    from sim.records.parquet import parquet_bytes  # noqa: PLC0415 (pyarrow takes a tenth of a second)

    gaps = Table({"gap_s": records.gap_s, "gap_count": records.gap_count, "gap_end_s": records.gap_end_s})
    yield GAPS, parquet_bytes(gaps, "zstd")
    plain: dict[str, Any] = {
        "end_s": records.end_s,
        "interrupted": records.interrupted,
        "pools": [pool._asdict() for pool in records.pools],
        "replicas": [replica._asdict() for replica in records.replicas],
    }
    if records.speculation is not None:
        plain[SPECULATES] = True
        yield ACCEPTANCE, parquet_bytes(acceptance_by_pool(records.speculation.acceptance), "zstd")
        yield BURSTS, parquet_bytes(records.speculation.bursts, "zstd")
    yield RECORDS, f"{json.dumps(plain)}\n".encode()


def read_records(table: Callable[[str], AnyTable], plain: dict[str, Any]) -> RunRecords:
    """Returns the records that figures need. table: reads the table of a file name; plain: records.json."""
    gaps = table(GAPS)
    speculation = None
    if plain.get(SPECULATES):
        speculation = SpeculationRecord(acceptance=table(ACCEPTANCE), bursts=table(BURSTS))
    return RunRecords(
        requests=table("requests.parquet"),
        iterations=table("iterations.parquet"),
        gap_s=column(gaps, "gap_s"),
        gap_count=column(gaps, "gap_count"),
        gap_end_s=column(gaps, "gap_end_s"),
        own_gaps=table("gaps.parquet"),
        speculation=speculation,
        **_plain_records(plain),
    )


def read_records_without_rows(table: Callable[[str], AnyTable], plain: dict[str, Any]) -> RunRecords:
    """Returns the records of a run with tables without rows or columns.

    table: reads the table of a file name, that of the acceptance of drafts. plain: records.json.
    """
    nothing, speculation = np.zeros(0), None
    if plain.get(SPECULATES):
        speculation = SpeculationRecord(acceptance=table(ACCEPTANCE), bursts=Table({}))
    return RunRecords(
        requests=Table({}),
        iterations=Table({}),
        gap_s=nothing,
        gap_count=nothing.astype(np.int64),
        gap_end_s=nothing,
        speculation=speculation,
        **_plain_records(plain),
    )


def _plain_records(plain: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `RunRecords` that are in records.json."""
    return {
        "pools": tuple(PoolRecord(**pool) for pool in plain["pools"]),
        "replicas": tuple(
            ReplicaRecord(**{**replica, "down": tuple(map(tuple, replica["down"]))})
            for replica in plain["replicas"]
        ),
        "end_s": plain["end_s"],
        "interrupted": plain["interrupted"],
    }
