"""The files in a run's folder. The same config and seed give tables with the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sim.metrics.result import RunResult
from sim.records.event_table import events_table
from sim.report.files import config_yaml, remove_folder_of_table, summary_json, table_bytes, write_whole
from sim.report.saved import saved_records

PLOTS = "plots.bin"
"""The file of the data that the plots of the page show, of a run that streams: `sim.metrics.plots.Plots`."""


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

    tables: false for a run that streams, which has written its tables; what its plots show goes to `PLOTS`.
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
