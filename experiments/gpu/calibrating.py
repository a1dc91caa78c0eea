"""Runs `windtunnel calibrate device=...` for one model: it fits the tables that `validate` simulates with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from experiments.calibrate.engine.run import check, measure
from experiments.calibrate.engine.settings import MeasureSettings
from experiments.gpu.record import Record
from experiments.gpu.validated_models import calibrated_folder, composition, suite_of
from experiments.validate.engine.suite import cases_of

LIMITS = {"max_num_seqs": 256, "max_model_len": 8192, "max_num_batched_tokens": 2048}
DRY_RUN = {
    "max_num_seqs": 16,
    "max_model_len": 2048,
    "max_num_batched_tokens": 64,
    "iterations": 4,
    "budget_s": 0.5,
}
MEDIAN_ERROR = 0.03  # largest accepted median error, as a share of an iteration's time


def run(record: Record) -> None:
    """Measures the tables; adds a row per kind of iteration with the error of the tables' times."""
    errors: list[Mapping[str, Any]] = []

    def tables() -> dict[str, Any]:
        report = _measured(record)
        errors.extend(report.pop("errors"))
        del report["iterations"]  # the report file holds them
        return report

    if record.measure("tables", tables) is None:
        return
    for row in errors:
        record.measure(f"iterations/{row['kind']}", partial(_judged, row), least_s=0.0)


def _measured(record: Record) -> dict[str, Any]:
    """Runs the calibration and returns its report, with the paths of its files."""
    (case, *_) = cases_of(composition(record), suite_of("single"), record.device.type, None)
    settings = MeasureSettings(
        device=record.device.type,
        model=case.scenario.model,
        out=str(calibrated_folder(record)),
        **(DRY_RUN if record.quick else LIMITS),
    )

    def progress(text: str) -> None:
        record.save("running", now=f"tables: {text}")

    node = case.config["model"]
    check(settings, node)
    found = measure(settings, node, progress)
    found.write()
    report: dict[str, Any] = json.loads(found.files.report.read_text(encoding="utf-8"))
    host = report["host"]
    summary = f"{len(found.operators)} operators; host time {host['iteration_s'] * 1e6:.0f} us per step"
    return report | {"files": found.files._asdict(), "said": f"{summary}, {found.notes[0]}"}


def _judged(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row of one kind of iteration; only the row of all iterations has a target."""
    summary = f"median error {row['median']:.1%} over {row['iterations']} iterations, p90 {row['p90']:.1%}"
    found = {**row, "said": f"{summary}, bias {row['bias']:+.1%}"}
    if row["kind"] != "all":
        return found
    met = bool(row["median"] <= MEDIAN_ERROR)
    verdict = f"; target {MEDIAN_ERROR:.0%}: {'met' if met else 'NOT met'}"
    return found | {
        "target": MEDIAN_ERROR,
        "reached": row["median"],
        "met": met,
        "said": found["said"] + verdict,
    }
