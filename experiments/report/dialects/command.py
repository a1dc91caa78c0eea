"""`windtunnel dialects run=DIR`: prints a finished run's metrics by the definitions of other tools."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from experiments.app.key_values import key_values
from experiments.app.run_folder import file_errors_reported
from experiments.app.settings.bounded_yaml import read_yaml
from experiments.app.terminal import print_tables, terminal_console
from experiments.report.run_files import check_run_folder, read_summary, read_table
from sim.metrics.definitions import Window
from sim.metrics.dialects import DIALECTS, DIFFERENCES, in_dialects
from sim.metrics.slo import TERMS, Slo
from sim.metrics.token_times import known_token_times
from sim.report.run_files import BURSTS
from sim.report.vllm_bench import FILE, write_vllm_bench
from sim.report.wording import dialect_tables
from sim.settings.errors import ConfigError, suggest

USAGE = f"""\
usage: windtunnel dialects run=DIR [dialect=all] [vllm_bench=false]

Prints the metrics of a finished run by the names and definitions of other load generators, side by side.

  run=DIR           folder of a run, as printed by windtunnel simulate (with output.tables=true)
  dialect=NAME      {", ".join(DIALECTS)}: the names of that tool; all: side by side, with their differences
  vllm_bench=true   also write {FILE} into the folder, in the format of vllm bench serve --save-detailed"""
SETTINGS = ("run", "dialect", "vllm_bench")
TABLES = ("requests", "iterations", "gaps")


class Options(NamedTuple):
    """The parsed arguments."""

    folder: Path
    dialects: tuple[str, ...]
    vllm_bench: bool


def main(arguments: Sequence[str]) -> None:
    """Prints the tables. Raises ConfigError for tables that are missing or do not match."""
    if not arguments:
        print(USAGE, file=sys.stderr)
        raise SystemExit(2)
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return
    options = parse(arguments)
    summary = read_summary(options.folder)
    tables = {name: read_table(options.folder, f"{name}.parquet") for name in TABLES}
    bursts = read_table(options.folder, BURSTS) if "speculation" in summary else None
    try:
        times = known_token_times(tables["requests"], tables["iterations"], tables["gaps"], bursts)
    except ValueError as error:
        raise ConfigError(f"run={options.folder}: {error}") from error
    window = Window(summary["trimmed"]["start_s"], summary["trimmed"]["end_s"])
    slo = _slo(summary)
    dialects = in_dialects(options.dialects, tables["requests"], times, window, slo)
    console = terminal_console(highlight=False)
    print_tables(dialect_tables({**summary, "dialects": dialects}), console)
    if len(options.dialects) > 1:
        for line in DIFFERENCES:
            console.print(Text(f"- {line}"))
    if times is None:
        console.print(Text("Requests have several outputs: gaps are not reported.", style="yellow"))
    if options.vllm_bench:
        if times is None:
            raise ConfigError(f"vllm_bench=true: {FILE} has one output per request, but this run has several")
        file = options.folder / FILE
        with file_errors_reported(file, "copy the folder to another place"):
            model, speculation = _model(options.folder), summary.get("speculation")
            write_vllm_bench(file, tables["requests"], times, window, slo, model, speculation)
        console.print(str(file), style="dim", soft_wrap=True)


def parse(arguments: Sequence[str]) -> Options:
    """Parses key=value arguments. Raises ConfigError."""
    given = key_values(arguments, SETTINGS)
    if not given.get("run"):
        raise ConfigError("run: must be given, for example run=outputs/simulate/...")
    name = given.get("dialect", "all")
    if name != "all" and name not in DIALECTS:
        raise ConfigError(f"dialect={name}: no such dialect; {suggest(name, [*DIALECTS, 'all'])}")
    if given.get("vllm_bench", "false") not in ("true", "false"):
        raise ConfigError(f"vllm_bench={given['vllm_bench']}: must be true or false")
    folder = Path(given["run"]).expanduser()
    check_run_folder(folder, ("summary.json", *(f"{name}.parquet" for name in TABLES)))
    dialects = tuple(DIALECTS) if name == "all" else (name,)
    return Options(folder, dialects, given.get("vllm_bench") == "true")


def _slo(summary: dict[str, Any]) -> Slo | None:
    goodput = summary["goodput"]
    if not goodput:
        return None
    limits_ms = {f"{term}_ms": goodput["slo"].get(f"{term}_ms") for term in TERMS}
    if not any(limits_ms.values()):
        return None
    return Slo(name=goodput["slo"]["name"], attainment_target=goodput["target"], **limits_ms)


def _model(folder: Path) -> str:
    file = folder / "config.yaml"
    config: Any = read_yaml(file) if file.is_file() else {}
    return str(config.get("model", {}).get("name", ""))
