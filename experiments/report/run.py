"""Draws a run's report again from the files in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from experiments.app.run_folder import scenario_part
from experiments.app.settings.bounded_yaml import read_yaml
from experiments.app.settings.compose import resolved
from experiments.report.run_files import TABLES_AGAIN, check_run_folder, read_summary, read_table
from experiments.study.export import export
from experiments.sweep.settings import ReportSettings
from hwmodels.checks import UnreadableFileError, read_bytes
from hwmodels.iterations import IterationModel, UnknownMachine
from sim.metrics.definitions import Window
from sim.metrics.plots import Plots, plots_of
from sim.report.page import Section, report_sections, write_sections
from sim.report.run_files import GAPS, PLOTS, RECORDS, read_records, read_records_without_rows
from sim.settings.errors import ConfigError
from sim.settings.recorded import check_recorded, read_json_object
from sim.settings.scenario import build_scenario
from sim.setup.scenario import Scenario
from sim.shards.accumulators import read_accumulator
from sim.shards.shard_file import DamagedShardError

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


STREAMED = ("config.yaml", "summary.json", "requests.parquet", PLOTS, RECORDS)


def redraw(folder: Path, settings: ReportSettings, *, trust: bool = False) -> list[Path]:
    """Draws the page and the images of a run's folder again.

    A run that has streamed its tables has plots.bin instead of iterations and gaps. trust: whether the
    folder's config may name any class that can be imported; see `check_recorded`. Raises ConfigError for a
    folder that lacks files.
    """
    is_streamed = (folder / "requests.parquet").is_dir() and not (folder / "iterations.parquet").exists()
    check_run_folder(folder, STREAMED if is_streamed else NEEDED)
    config = read_yaml(folder / "config.yaml")
    if not isinstance(config, dict):
        raise ConfigError(f"run={folder}: config.yaml is empty or damaged; {TABLES_AGAIN}")
    if not trust:
        check_recorded(config, f"run={folder}")
    summary = read_summary(folder)
    scenario = _scenario(folder, config)
    read = _streamed_sections if is_streamed else _whole_sections
    sections = read(folder, scenario, summary)
    written = []
    if "html" in settings.format:
        write_sections(folder / PAGE, sections, summary, config)
        written.append(folder / PAGE)
    pictures = [name for name in settings.format if name != "html"]
    if pictures:
        charts = {section.title: section.figure for section in sections}
        known = {title: chart.figure() for title, chart in charts.items() if chart is not None}
        written += export(known, folder / "figures", pictures)
    return written


def _scenario(folder: Path, config: dict[str, Any]) -> Scenario:
    try:
        return build_scenario(resolved(scenario_part(config)))
    except (KeyError, TypeError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"run={folder}: config.yaml is damaged: {str(error).partition(chr(10))[0]}; {TABLES_AGAIN}"
        ) from error


def _whole_sections(folder: Path, scenario: Scenario, summary: dict[str, Any]) -> list[Section]:
    """Returns the sections of a run with whole tables."""
    plain = read_json_object(folder / RECORDS, f"run={folder}")
    try:
        records = read_records(partial(read_table, folder), plain)
        trimmed = summary["trimmed"]
        window = Window(trimmed["start_s"], trimmed["end_s"])
        plots = plots_of(records, records.requests, window, _models(scenario, summary), scenario.slo)
        return report_sections(plots, records, summary, scenario.slo)
    except (KeyError, TypeError) as error:
        raise _of_other_version(folder, error) from error


def _streamed_sections(folder: Path, scenario: Scenario, summary: dict[str, Any]) -> list[Section]:
    """Returns the sections of a run that has streamed its tables."""
    plain = read_json_object(folder / RECORDS, f"run={folder}")
    try:
        plots = read_accumulator(_bytes(folder, PLOTS), Plots)
        end = read_records_without_rows(partial(read_table, folder), plain)
        return report_sections(plots, end, summary, scenario.slo)
    except DamagedShardError as error:
        raise ConfigError(
            f"run={folder}: {PLOTS} is damaged or cut short; simulate it again with output.report=true"
        ) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise _of_other_version(folder, error) from error


def _bytes(folder: Path, name: str) -> bytes:
    try:
        return read_bytes(folder / name)
    except (OSError, UnreadableFileError) as error:
        raise ConfigError(f"run={folder}: {name}: {error}") from None


def _of_other_version(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"run={folder}: its files are not those of this version of windtunnel: {error}; {TABLES_AGAIN}"
    )


def _models(scenario: Scenario, summary: Mapping[str, Any]) -> list[IterationModel]:
    """Returns the hardware models of the pools; a session on a machine without a description has none."""
    if summary.get("mfu") is None:
        return [UnknownMachine()]
    return [pool.iteration_model() for pool in scenario.pools_by_name.values()]
