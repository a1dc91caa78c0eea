"""The files in a run's folder. The same config and seed give tables with the same bytes.

In addition to the tables, these files are needed to rewrite the report without a simulation: itl.parquet:
every gap between two tokens (seconds, number of sequences, end), including the gaps of single requests that
gaps.parquet has.
records.json: pools, replicas and the end of the run.
If replicas speculate, also acceptance.parquet, one row per pool and place of a draft token, and
bursts.parquet, one row per pass that kept draft tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sim.metrics.features import acceptance_by_pool
from sim.metrics.result import RunResult
from sim.records.run import PoolRecord, ReplicaRecord, RunRecords, events_table
from sim.records.table import AnyTable, Table, column
from sim.report.files import config_yaml, remove_folder_of_table, summary_json, table_bytes, write_whole
from sim.speculation.log import SpeculationRecord

GAPS, RECORDS = "itl.parquet", "records.json"
ACCEPTANCE, BURSTS = "acceptance.parquet", "bursts.parquet"
SPECULATES = "speculates"
"""Key of records.json for runs with the last two tables."""


PLOTS = "plots.bin"
"""The file with the plot data of a streaming run: `sim.metrics.plots.Plots`."""


def write_result(
    folder: Path,
    result: RunResult,
    config: dict[str, Any],
    *,
    tables: bool,
    report: bool,
    timeline: bool = False,
    timeline_requests: int | None = None,
    vllm_bench: bool = False,
) -> list[str]:
    """Writes the files of a run into `folder`, which is created if necessary; returns notes for the user.

    tables: False for a streaming run, which has already written its tables; its plot data goes to `PLOTS`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in run_files(result, config, tables=tables):
        remove_folder_of_table(folder / name)
        write_whole(folder / name, content)
    if vllm_bench:
        from sim.metrics.token_times import token_times  # noqa: PLC0415 (few runs write this file)
        from sim.report.vllm_bench import FILE as VLLM_BENCH  # noqa: PLC0415
        from sim.report.vllm_bench import write_vllm_bench  # noqa: PLC0415

        records = result.records
        write_vllm_bench(
            folder / VLLM_BENCH,
            records.requests,
            token_times(records.requests, records.iterations, records.own_gaps, records.bursts),
            result.window,
            result.slo,
            str(config.get("model", {}).get("name", "")),
            result.summary.get("speculation"),
        )
    note = None
    if timeline:
        from sim.report.perfetto import write_timeline  # noqa: PLC0415 (few runs write this file)

        note = write_timeline(folder / "timeline.json", result.records, timeline_requests, result.models)
    adds_up = result.sums is not None and result.sums.figures.setting.plots
    plots = result.plots() if report or adds_up else None
    if plots is not None and adds_up:
        from sim.shards.accumulators import accumulator_bytes  # noqa: PLC0415 (most runs do not stream)

        write_whole(folder / PLOTS, accumulator_bytes(plots))
    if plots is not None and report:
        from sim.report.page import write_report  # noqa: PLC0415 (runs of a study draw no page)

        write_report(folder / "report.html", plots, result.records, result.summary, config, result.slo)
    return [note] if note else []


def run_files(result: RunResult, config: Mapping[str, Any], *, tables: bool) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of the files of a run, except pages and timeline; summary.json is last."""
    yield "config.yaml", config_yaml(config).encode()
    if tables:
        records = result.records
        yield "requests.parquet", table_bytes(result.requests)
        yield "iterations.parquet", table_bytes(records.iterations)
        yield "replicas.parquet", table_bytes(result.replicas)
        yield "events.parquet", table_bytes(events_table(records))
        yield "gaps.parquet", table_bytes(records.own_gaps)
        yield from saved_records(records)
    yield "summary.json", summary_json(result.summary).encode()


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
    """Returns the records that metrics need. table: reads the table of a file name; plain: records.json."""
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

    table: reads the acceptance table by its file name. plain: records.json.
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
