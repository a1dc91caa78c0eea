"""Draws a run's report again from the files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from experiments.study.export import export
from experiments.sweep.settings import ReportSettings
from sim.report.page import report_sections, write_report
from sim.report.saved import GAPS, RECORDS, read_records
from sim.settings.bounded_yaml import read_yaml
from sim.settings.errors import ConfigError
from sim.settings.json_files import read_json_object
from sim.settings.recorded import check_recorded
from sim.settings.scenario import build_scenario

PAGE = "report.html"
NEEDED = (
    "config.yaml",
    "summary.json",
    "requests.parquet",
    "iterations.parquet",
    "gaps.parquet",
    GAPS,
    RECORDS,
)


def redraw(folder: Path, settings: ReportSettings, *, trust: bool = False) -> list[Path]:
    """Draws the page and the images of a run's folder again.

    trust: whether the folder's config may name any class that can be imported; see `check_recorded`.
    Raises ConfigError for a folder that lacks files.
    """
    _check(folder)
    config: Any = read_yaml(folder / "config.yaml")
    if not trust:
        check_recorded(config, f"run={folder}")
    summary = read_json_object(folder / "summary.json", f"run={folder}")
    records = read_records(
        lambda name: pd.read_parquet(folder / name),
        read_json_object(folder / RECORDS, f"run={folder}"),
    )
    scenario = build_scenario(OmegaConf.create(config))
    drawn: dict[str, Any] = {
        "records": records,
        "request_table": records.requests,
        "summary": summary,
        "models": [pool.iteration_model() for pool in scenario.pools_by_name.values()],
        "slo": scenario.slo,
    }
    written = []
    if "html" in settings.format:
        write_report(folder / PAGE, config=config, **drawn)
        written.append(folder / PAGE)
    pictures = [name for name in settings.format if name != "html"]
    if pictures:
        charts = {section.title: section.figure for section in report_sections(**drawn)}
        known = {title: chart.figure() for title, chart in charts.items() if chart is not None}
        written += export(known, folder / "figures", pictures)
    return written


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"run={folder}: no such folder; give the folder that windtunnel simulate printed")
    if (folder / "sweep.json").exists():
        raise ConfigError(f"run={folder}: is the folder of a sweep; give sweep={folder}")
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if not missing:
        return
    inner = sorted(folder.glob("*/summary.json"))
    if "summary.json" in missing and inner:
        raise ConfigError(f"run={folder}: contains several runs; choose one, such as run={inner[0].parent}")
    raise ConfigError(
        f"run={folder}: contains no {', '.join(missing)}; simulate it again with output.tables=true "
        "(in a sweep: sweep.tables=true)"
    )
