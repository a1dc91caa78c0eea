"""Predicts the rows of a table, in processes, and yields each prediction as soon as it is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.score.kinds import KINDS
from experiments.study.launchers.local import Local
from experiments.study.launchers.outcome import WorkerDiedError
from experiments.study.presets import NotSimulatedError
from hwmodels.levels import LatencyLevel
from sim.engine.clock import Interrupt


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTask:
    """A row to predict."""

    kind: str
    latency: LatencyLevel
    row: dict[str, Any]

    @property
    def name(self) -> str:
        return f"id={self.row['id']}"

    def run(self) -> dict[str, Any]:
        return predict_row(self.kind, self.latency, self.row)


def predictions(
    kind: str, latency: LatencyLevel, rows: Sequence[dict[str, Any]], jobs: int | None, interrupt: Interrupt
) -> Iterator[dict[str, Any]]:
    """Yields one prediction per row as they finish; after Ctrl-C no row is begun.

    jobs: processes; None: one per core. A row whose process is killed, as for lack of memory, gets that
    reason as its status.
    """
    tasks = [RowTask(kind=kind, latency=latency, row=row) for row in rows]
    outcomes = Local(jobs=jobs).outcomes(RowTask.run, tasks, interrupt)
    try:
        for outcome in outcomes:
            if isinstance(outcome.error, WorkerDiedError):
                yield {"id": rows[outcome.index]["id"], "status": str(outcome.error)}
            elif outcome.error is not None:
                raise outcome.error
            elif outcome.result is not None:
                yield outcome.result
    finally:
        outcomes.close()


def predict_row(kind: str, latency: LatencyLevel, row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row's id with its predictions and status ok, or with the reason as its status."""
    try:
        return {"id": row["id"], **KINDS[kind].predict(row, latency), "status": "ok"}
    except (NotSimulatedError, ValueError) as error:
        return {"id": row["id"], "status": " ".join(str(error).split())}
