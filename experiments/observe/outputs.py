"""Writes the folder of an observed run: a simulated run's tables, and those that only a client has."""

from __future__ import annotations

import gzip
import html
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from experiments.app.run_folder import write_study
from experiments.observe.load import Load
from experiments.observe.tables import capture_table, chunks_table
from sim.metrics.definitions import Window
from sim.metrics.measured import request_metrics
from sim.metrics.plots import plots_of
from sim.metrics.slo import Slo
from sim.records.run import RunRecords, events_table
from sim.records.table import to_pandas
from sim.report.files import write_table, write_whole
from sim.report.plain_page import drawn, write_page
from sim.report.plots import latency_cdfs, slo_attainment, ttft_by_prompt_length


def write_observation(
    folder: Path,
    records: RunRecords,
    load: Load,
    summary: dict[str, Any],
    config: dict[str, Any],
    *,
    slo: Slo | None,
    report: bool,
) -> None:
    """Writes the files; the attrs of requests.parquet carry the digest of the configuration."""
    write_study(folder, config, summary)
    requests = request_metrics(to_pandas(records.requests), slo)
    requests.attrs = {"source": "observed", "config_digest": summary["config_digest"]}
    write_table(requests, folder / "requests.parquet")
    write_table(chunks_table(load.replies), folder / "chunks.parquet")
    write_table(events_table(records), folder / "events.parquet")
    capture = capture_table(requests, load.replies, folder.name).to_csv(index=False)
    write_whole(folder / "requests.csv.gz", gzip.compress(capture.encode()))
    if report:
        _write_page(folder / "report.html", records, requests, summary, config, slo)


def _write_page(
    file: Path,
    records: RunRecords,
    requests: pd.DataFrame,
    summary: dict[str, Any],
    config: dict[str, Any],
    slo: Slo | None,
) -> None:
    window = Window(summary["trimmed"]["start_s"], summary["trimmed"]["end_s"])
    plots = plots_of(records, requests, window, (), slo)
    sections = {}
    if plots.latencies["ttft"].count:
        if slo:
            chart = slo_attainment(plots, summary["goodput"], window, slo)
            sections["SLO attainment"] = drawn(chart.figure())
        sections["Latency"] = drawn(latency_cdfs(plots, slo).figure())
        sections["TTFT against prompt length"] = drawn(ttft_by_prompt_length(plots, slo).figure())
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in summary["notes"])
    sections["Notes"] = f"<ul>{notes}</ul>"
    sections["Configuration"] = f"<pre>{html.escape(OmegaConf.to_yaml(OmegaConf.create(config)))}</pre>"
    counts = summary["requests"]
    introduction = (
        f"{counts['finished']:,} of {counts['arrived']:,} requests finished in "
        f"{summary['simulated_s']:.1f} s. Times are measured at the client from the time of sending."
    )
    write_page(file, f"Observed: {summary['endpoint']['model']} at {config['url']}", introduction, sections)
