"""`windtunnel explain run=DIR request=ID`: prints the phases of one request and the reason of every wait."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from experiments.app.key_values import key_values
from experiments.app.terminal import plain_table, print_tables, terminal_console
from experiments.report.explain.comparison import compared_rows, compared_sentence
from experiments.report.explain.narrative import heading, lines, verdicts
from experiments.report.explain.run_folder import read_request
from sim.report import numbers
from sim.settings.errors import ConfigError

USAGE = """\
usage: windtunnel explain run=DIR request=ID

The phases of one request: every wait with its reason, what the cache held, preemptions and SLO attainment;
and each phase beside its mean and its 99th percentile over the requests of the run.

  run=DIR      folder of a run, as printed by windtunnel simulate (with output.tables=true)
  request=ID   a request_id of its requests.parquet"""
SETTINGS = ("run", "request")


def main(arguments: Sequence[str]) -> None:
    """Prints the timeline of a request. Raises ConfigError if it cannot be reconstructed."""
    if not arguments:
        print(USAGE, file=sys.stderr)
        raise SystemExit(2)
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return
    folder, request_id = parse(arguments)
    story = read_request(folder, request_id)
    console = terminal_console(highlight=False)
    console.print(Text(heading(story), style="bold"))
    rows = [("ms", "duration", "")]
    for line in lines(story):
        duration = "" if math.isnan(line.lasted_s) else numbers.milliseconds(line.lasted_s)
        rows.append((f"{line.at_s * 1e3:,.1f}", duration, line.what))
    console.print(plain_table(rows, label_columns=(2,)))
    for verdict in verdicts(story):
        console.print(Text(verdict), soft_wrap=True)
    print_tables([compared_rows(story)], console)
    if sentence := compared_sentence(story):
        console.print(Text(sentence), soft_wrap=True)


def parse(arguments: Sequence[str]) -> tuple[Path, int]:
    """Parses the arguments run and request. Raises ConfigError."""
    given = key_values(arguments, SETTINGS)
    for key, example in (("run", "run=outputs/simulate/..."), ("request", "request=0")):
        if not given.get(key):
            raise ConfigError(f"{key}: must be given, for example {example}")
    if not given["request"].isdecimal():
        raise ConfigError(f"request={given['request']}: must be an integer >= 0")
    return Path(given["run"]), int(given["request"])
