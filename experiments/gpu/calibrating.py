"""`windtunnel calibrate device=...` for one model: the tables that `validate` simulates with."""

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
MEDIAN_ERROR = 0.03  # of an iteration's time, at most


def run(record: Record) -> None:
    """A row for what was measured, and a row a kind of whole iterations against the table's price."""
    errors: list[Mapping[str, Any]] = []

    def tables() -> dict[str, Any]:
        report = _measured(record)
        errors.extend(report.pop("errors"))
        del report["iterations"]  # they are in the file
        return report

    if record.measure("tables", tables) is None:
        return
    for row in errors:
        record.measure(f"iterations/{row['kind']}", partial(_judged, row), least_s=0.0)


def _measured(record: Record) -> dict[str, Any]:
    """What the report says."""
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
    report: dict[str, Any] = json.loads(found.files.report.read_text(encoding="utf-8"))
    host = report["host"]
    said = f"{len(found.operators)} operators; the host {host['iteration_s'] * 1e6:.0f} us a step"
    return report | {"files": found.files._asdict(), "said": f"{said}, {found.notes[0]}"}


def _judged(row: Mapping[str, Any]) -> dict[str, Any]:
    """The target is for all iterations; the errors of each kind are reported beside it."""
    said = f"median error {row['median']:.1%} of {row['iterations']}, p90 {row['p90']:.1%}"
    found = {**row, "said": f"{said}, bias {row['bias']:+.1%}"}
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
