"""Errors of the tails of open-loop runs, with a jitter that was chosen on the runs of other models.

    python -m experiments.score.held_out_jitter measured=../shared/data/vllm_experiments/experiments.csv

Every run is simulated with each of `CANDIDATES`. For the runs of one model, the candidate is used with
which the shape of the E2E tails, p90 / mean and p99 / mean, is closest to the measurements of all other
models: the smallest mean of |ln(predicted / measured)|. The shape does not change if all iteration times are
wrong by the same factor, so jitter is not chosen to hide errors of the hardware model. Prints median and
median absolute percentage errors without jitter and with the chosen one, and the choices.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.score import runs
from experiments.score.predictions import predict_row
from experiments.score.table import read_table
from experiments.study.errors import errors
from hwmodels.iterations import Jitter
from hwmodels.levels import Calibrated
from sim.settings.errors import ConfigError

WITHOUT = "none"
CANDIDATES: dict[str, Jitter | None] = {
    WITHOUT: None,
    "drift of 1 %": Jitter(independent_cv=0.008, drift_cv=0.01, drift_iterations=300),
    "drift of 2 %": Jitter(independent_cv=0.008, drift_cv=0.02, drift_iterations=300),
    "drift of 3 %": Jitter(independent_cv=0.008, drift_cv=0.03, drift_iterations=300),
    "slower drift of 2 %": Jitter(independent_cv=0.008, drift_cv=0.02, drift_iterations=1000),
    "stragglers": Jitter(independent_cv=0.008, straggler_share=0.005, straggler_factor=3),
}


def predicted_runs(table: pd.DataFrame, jitter: Jitter | None) -> pd.DataFrame:
    """Returns the table with a column NAME_predicted for each metric."""
    latency = Calibrated(jitter=jitter)
    rows = [predict_row("experiments", latency, dict(row)) for _, row in table.iterrows()]
    predicted = pd.DataFrame(rows).rename(columns={name: f"{name}_predicted" for name in runs.METRICS})
    return table.merge(predicted, on="id")


def tail_mismatch(scored: pd.DataFrame) -> float:
    """Returns the mean of |ln(predicted / measured)| of p90 / mean and p99 / mean of E2E."""
    differences = []
    for percentile in ("p90", "p99"):
        shapes = [
            scored[f"e2e_{percentile}_ms{suffix}"] / scored[f"e2e_mean_ms{suffix}"]
            for suffix in ("", "_predicted")
        ]
        differences.append(np.abs(np.log(shapes[1] / shapes[0])))
    return float(pd.concat(differences).mean())


def held_out(scored: Mapping[str, pd.DataFrame]) -> tuple[pd.DataFrame, dict[str, str]]:
    """Returns the runs of each model with the candidate chosen on all others, and the choices by model.

    scored: the predicted runs of each candidate.
    """
    models = sorted(set(scored[WITHOUT]["model"]))
    chosen = {
        model: min(scored, key=lambda name: tail_mismatch(_of(scored[name], model, inside=False)))
        for model in models
    }
    return pd.concat([_of(scored[name], model) for model, name in chosen.items()]), chosen


def _of(scored: pd.DataFrame, model: str, *, inside: bool = True) -> pd.DataFrame:
    return scored[(scored["model"] == model) == inside]


def error_table(columns: Mapping[str, pd.DataFrame]) -> str:
    """Returns a Markdown table: per metric, median absolute error and (median error) of each column, in %."""
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for metric in runs.METRICS:
        cells = []
        for scored in columns.values():
            found = errors(scored[f"{metric}_predicted"], scored[metric])
            cells.append(f"{found.median:.1f} ({found.bias:+.1f})")
        lines.append(f"| {metric} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Prints the errors and the choices. Raises ConfigError for arguments or tables that cannot be used."""
    if len(arguments) != 1 or not arguments[0].startswith("measured="):
        raise ConfigError("measured: must be given, for example measured=experiments.csv; no other setting")
    path = Path(arguments[0].partition("=")[2])
    table = read_table(path, (*runs.COLUMNS, *runs.METRICS), runs.POSITIVE)
    scored = {name: predicted_runs(table, jitter) for name, jitter in CANDIDATES.items()}
    found, chosen = held_out(scored)
    print(error_table({"without jitter": scored[WITHOUT], "chosen on other models": found}))
    for name in CANDIDATES:
        print(
            f"{name}: chosen for {sum(choice == name for choice in chosen.values())} of {len(chosen)} models"
        )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"held_out_jitter: {error}", file=sys.stderr)
        sys.exit(2)
