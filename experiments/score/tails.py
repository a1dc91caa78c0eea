"""Says how far the TTFT p99 of open-loop runs depends on the seed, and how far on the first seconds of a run.

    python -m experiments.score.tails measured=../shared/data/vllm_experiments/experiments.csv seeds=10
    python -m experiments.score.tails measured=... seeds=60 "where=id=='vllm-56'"

Every run is simulated with the seeds 0, 1, ..., which differ in the times of arrivals and the order of the
prompts. The table has, by run, the TTFT p99: measured, and the median and the quantiles 5 % and 95 % over the
seeds; the range over the seeds of the share of requests that waited for a sequence slot or KV memory; and the
TTFT p99 of the last of several stages alone, which does not have the first seconds of the run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.score import runs
from experiments.score.table import chosen_rows, read_table
from experiments.study.measured_rows import simulated
from hwmodels.levels import Calibrated
from sim.metrics.confidence import Interval
from sim.metrics.kv_use import held_back
from sim.report.numbers import bounds_text, mean_text
from sim.settings.errors import ConfigError

ARGUMENTS = {"measured": "", "seeds": "10", "where": ""}
HEADING = ("run", "model", "measured", "simulated", "held back, %", "last stage", "simulated")
LAST_STAGE = "stage1_ttft_p99_ms"


class Tail(NamedTuple):
    """The TTFT of one simulation of a run."""

    p99_ms: float
    held_back_share: float
    """Share of requests that waited for a sequence slot or KV memory."""
    last_stage_p99_ms: float
    """TTFT p99 of the requests of the last stage."""


def tail_of_run(row: Mapping[str, Any], seed: int) -> Tail:
    """Simulates a measured run. Raises NotSimulatedError or ValueError."""
    _, table = simulated(replace(runs.scenario_of(dict(row), Calibrated()), seed=seed))
    return tail_of_requests(table, [runs.stage_of(text, row["id"]) for text in str(row["stages"]).split(";")])


def tail_of_requests(table: pd.DataFrame, stages: Sequence[tuple[float, float]]) -> Tail:
    """Computes the figures of the requests of a run with these stages, (requests/s, seconds) each."""
    ttft_ms = 1e3 * table["ttft_s"].to_numpy(dtype=np.float64)
    last_begins_s = sum(seconds for _, seconds in stages[:-1])
    in_last = table["arrival_s"].to_numpy(dtype=np.float64) > last_begins_s
    return Tail(
        float(np.percentile(ttft_ms, 99)),
        float(held_back(table).mean()),
        float(np.percentile(ttft_ms[in_last], 99)),
    )


def line(row: Mapping[str, Any], tails: Sequence[Tail]) -> list[str]:
    """Returns the cells of a run, as `HEADING` names them. tails: one per seed."""
    p99_ms, shares, last_ms = map(np.array, zip(*tails, strict=True))
    measured_last_ms = row.get(LAST_STAGE)
    has_last = measured_last_ms is not None and pd.notna(measured_last_ms)
    return [
        str(row["id"]),
        str(row["model"]).rpartition("/")[2],
        f"{row['ttft_p99_ms']:.1f}",
        _interval(p99_ms),
        f"{100 * shares.min():.2g} to {100 * shares.max():.2g}",
        f"{measured_last_ms:.1f}" if has_last else "",
        _interval(last_ms) if has_last else "",
    ]


def _interval(values: Any) -> str:
    low, middle, high = np.percentile(values, [5, 50, 95])
    interval = Interval(middle, low, high, len(values))
    return f"{mean_text(interval)} ({bounds_text(interval)})"


def main(arguments: Sequence[str]) -> None:
    """Prints the table. Raises ConfigError for arguments or tables that cannot be used."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := [name for name in given if name not in ARGUMENTS]:
        raise ConfigError(f"{unknown[0]}: no such argument; must be one of {', '.join(ARGUMENTS)}")
    settings = ARGUMENTS | given
    if not settings["measured"]:
        raise ConfigError("measured: must be given, for example measured=experiments.csv")
    if not (settings["seeds"].isdecimal() and int(settings["seeds"])):
        raise ConfigError(f"seeds={settings['seeds']}: must be a whole number >= 1, the number of seeds")
    table = read_table(Path(settings["measured"]), (*runs.COLUMNS, *runs.METRICS), runs.POSITIVE)
    if settings["where"]:
        try:
            table = chosen_rows(table, settings["where"])
        except pd.errors.UndefinedVariableError as error:
            raise ConfigError(f"where={settings['where']}: {error} in the table") from error
    print("|", " | ".join(HEADING), "|")
    print("|---" * len(HEADING) + "|")
    rows: Any = table.to_dict("records")
    for row in rows:
        tails = [tail_of_run(row, seed) for seed in range(int(settings["seeds"]))]
        print("|", " | ".join(line(row, tails)), "|", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"tails: {error}", file=sys.stderr)
        sys.exit(2)
