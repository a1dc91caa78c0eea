"""Saves and reads the records that figures need besides the tables of a run.

itl.parquet: every gap between two tokens (seconds, number of sequences, end), including the gaps of single
requests that gaps.parquet has.
records.json: pools, replicas and the end of the run.
With these files and the tables, the report can be written again without a simulation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import pandas as pd

from sim.records.run import PoolRecord, ReplicaRecord, RunRecords

GAPS, RECORDS = "itl.parquet", "records.json"


def saved_records(records: RunRecords) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of both files."""
    gaps = pd.DataFrame(
        {"gap_s": records.gap_s, "gap_count": records.gap_count, "gap_end_s": records.gap_end_s}
    )
    content = BytesIO()
    gaps.to_parquet(content, index=False, compression="zstd")
    yield GAPS, content.getvalue()
    plain = {
        "end_s": records.end_s,
        "interrupted": records.interrupted,
        "pools": [pool._asdict() for pool in records.pools],
        "replicas": [replica._asdict() for replica in records.replicas],
    }
    yield RECORDS, f"{json.dumps(plain)}\n".encode()


def read_records(table: Callable[[str], pd.DataFrame], plain: dict[str, Any]) -> RunRecords:
    """Returns the records that figures need. table: reads the table of a file name; plain: records.json."""
    gaps = table(GAPS)
    return RunRecords(
        requests=table("requests.parquet"),
        iterations=table("iterations.parquet"),
        gap_s=gaps["gap_s"].to_numpy(),
        gap_count=gaps["gap_count"].to_numpy(),
        gap_end_s=gaps["gap_end_s"].to_numpy(),
        pools=tuple(PoolRecord(**pool) for pool in plain["pools"]),
        replicas=tuple(
            ReplicaRecord(**{**replica, "down": tuple(map(tuple, replica["down"]))})
            for replica in plain["replicas"]
        ),
        own_gaps=table("gaps.parquet"),
        end_s=plain["end_s"],
        interrupted=plain["interrupted"],
    )
