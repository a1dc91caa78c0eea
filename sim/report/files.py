"""What a run leaves in its folder. The same config and seed give the same bytes in the tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from sim.events import events_table
from sim.report import write_report
from sim.report.perfetto import write_timeline
from sim.result import RunResult


def write_result(
    folder: Path,
    result: RunResult,
    config: dict[str, Any],
    *,
    tables: bool,
    report: bool,
    timeline: bool = False,
    timeline_requests: int | None = None,
) -> list[str]:
    """Write a run's files into `folder`, which is made if need be; returns what the user should know."""
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    (folder / "summary.json").write_text(json.dumps(result.summary, indent=2) + "\n")
    if tables:
        write_table(result.requests, folder / "requests.parquet")
        write_table(result.records.iterations, folder / "iterations.parquet")
        write_table(result.replicas, folder / "replicas.parquet")
        write_table(events_table(result.records), folder / "events.parquet")
        write_table(result.records.own_gaps, folder / "gaps.parquet")
    note = None
    if timeline:
        note = write_timeline(folder / "timeline.json", result.records, timeline_requests, result.models)
    if report:
        write_report(
            folder / "report.html",
            records=result.records,
            request_table=result.requests,
            summary=result.summary,
            models=result.models,
            config=config,
            slo=result.slo,
        )
    return [note] if note else []


def write_table(table: pd.DataFrame, file: Path) -> None:
    """One parquet file."""
    table.to_parquet(file, index=False, compression="zstd")


def config_digest(config: Mapping[str, Any]) -> str:
    """Of a resolved configuration: equal settings, equal digests, in whatever order they stand."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
