"""Computes the hardware model's error for the iterations of a real engine, by kind, batch and context.

The model prices each measured iteration from its shape, so scheduling plays no part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from experiments.study.errors import SHARE, Errors, errors
from experiments.validate.fidelity.measured import Measured
from hwmodels.iterations import COUNTED, IterationModel
from sim.metrics.figure import KINDS, iteration_kind, iteration_shape
from sim.metrics.series import octaves


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationError:
    """Errors of iterations of one kind and one bucket of batch or context, over all real runs.

    Relative errors are signed: model / measured - 1. median_absolute: median of their absolute values; total:
    error of the summed durations. noise: spread of the real runs' medians, NaN for one run.
    """

    kind: str
    batch: str
    """Bucket of sequences per iteration, such as 8-15; empty: all."""
    context: str
    """Bucket of KV tokens per sequence; empty: all."""
    count: int
    measured_s: float
    """Mean measured duration, in seconds."""
    median: float
    p10: float
    p90: float
    median_absolute: float
    total: float
    noise: float

    def to_json(self) -> dict[str, Any]:
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }


def has_shapes(run: Measured) -> bool:
    """Returns whether the run's iterations have the columns that the model needs."""
    columns = () if run.iterations is None else run.iterations.columns
    return {"duration_s", *COUNTED} <= set(columns)


def iteration_errors(reals: Sequence[Measured], model: IterationModel) -> list[IterationError]:
    """Computes errors of all iterations, then of each kind, then of its octaves of batch and context.

    Returns none without shapes. Iterations with no duration, or without a price, are left out.
    """
    tables = [_priced(run, model) for run in reals if has_shapes(run)]
    if not tables:
        return []
    table = pd.concat([one.assign(run=i) for i, one in enumerate(tables)], ignore_index=True)
    if table.empty:
        return []
    errors = [_figures(table, "all", len(tables))]
    for kind, rows in _by(table, "kind", KINDS):
        errors.append(_figures(rows, kind, len(tables)))
        for column in ("batch", "context"):
            for label, bucket in _buckets(rows, column):
                errors.append(_figures(bucket, kind, len(tables), **{column: label}))
    return errors


def _priced(run: Measured, model: IterationModel) -> pd.DataFrame:
    assert run.iterations is not None
    iterations = run.iterations
    seqs = (iterations["decode_seqs"] + iterations["prefill_seqs"]).to_numpy(dtype=np.int64)
    context = (iterations["decode_context_tokens"] + iterations["prefill_context_tokens"]).to_numpy()
    durations_s = iterations["duration_s"].to_numpy(dtype=np.float64)
    seconds = np.broadcast_to(model.seconds(iteration_shape(iterations, model)), durations_s.shape)
    table = pd.DataFrame(
        {
            "kind": np.array(KINDS)[iteration_kind(iterations)],
            "batch": seqs,
            "context": context // np.maximum(seqs, 1),
            "measured_s": durations_s,
            "model_s": seconds,
        }
    )
    return table[(table["measured_s"] > 0) & table["model_s"].notna()]


def _by(table: pd.DataFrame, column: str, values: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    for value in values:
        rows = table[table[column] == value]
        if len(rows):
            yield value, rows


def _buckets(rows: pd.DataFrame, column: str) -> Iterator[tuple[str, pd.DataFrame]]:
    lower, index = octaves(rows[column].to_numpy(dtype=np.int64))
    for i, low in enumerate(lower.tolist()):
        yield (str(low) if low == 1 else f"{low}-{2 * low - 1}"), rows[index == i]


def _figures(
    rows: pd.DataFrame, kind: str, num_runs: int, *, batch: str = "", context: str = ""
) -> IterationError:
    found = _errors(rows)
    medians = [_errors(one).bias for _, one in rows.groupby("run")]
    return IterationError(
        kind=kind,
        batch=batch,
        context=context,
        count=len(rows),
        measured_s=float(rows["measured_s"].mean()),
        median=found.bias,
        p10=found.low,
        p90=found.high,
        median_absolute=found.median,
        total=found.total,
        noise=max(medians) - min(medians) if num_runs > 1 and len(medians) > 1 else math.nan,
    )


def _errors(rows: pd.DataFrame) -> Errors:
    return errors(rows["model_s"], rows["measured_s"], unit=SHARE)
