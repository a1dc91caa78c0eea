"""`windtunnel validate device=...` for one model: runs our engine and compares it with the simulator.

There is one row per case; its recordings and its validation.json are in validated_<model>/<suite>/<case>. One
executor serves all cases. It is rebuilt for another block size, so those cases come last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

from experiments.calibrate.engine.files import Files
from experiments.gpu.record import Record, Row
from experiments.gpu.validated_models import calibrated_folder, composition, model_name, suite_of
from experiments.validate.engine.on_engine import ExecutorCache, machine_name, run_case, write_verdict
from experiments.validate.engine.recording import Recording
from experiments.validate.engine.suite import Case, cases_of
from experiments.validate.engine.verdict import Verdict
from experiments.validate.fidelity.errors import MetricError


class SuiteRun(NamedTuple):
    """A suite and its overrides. has_targets: it has enough requests to compare times with the targets."""

    suite: str
    overrides: tuple[str, ...]
    has_targets: bool
    least_s: float


SUITES = (
    SuiteRun(
        "load",
        (
            "repeats=2",
            "workload.num_requests=200",
            "workload.lengths.prompt_tokens.mean=512",
            "workload.lengths.output_tokens.mean=128",
        ),
        True,
        25.0,
    ),
    SuiteRun("policies", ("repeats=1", "workload.num_requests=24"), False, 8.0),
    SuiteRun("workload_gpu", ("repeats=1",), True, 15.0),
)
DRY_RUN: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "load": (("repeats=2", "workload.num_requests=10"), ("load_60", "load_110")),
    "policies": (("repeats=1", "workload.num_requests=10"), ("chunked", "swap", "radix")),
    "workload_gpu": (("repeats=1", "workload.num_requests=10"), ("short",)),
}
"""Overrides and cases of a dry run (`--quick`), by suite."""
TARGETS: Mapping[str, tuple[str, ...]] = {
    "tpot_mean": ("tpot_mean_s",),
    "e2e_mean": ("e2e_mean_s",),
    "ttft_mean": ("ttft_mean_s",),
    "p99": ("ttft_p99_s", "tpot_p99_s", "itl_p99_s", "e2e_p99_s"),
    "throughput": ("requests_per_s", "output_tokens_per_s"),
    "iteration": ("iteration_median",),
}
"""Targets and the metrics that each covers; the thresholds are in configs/thresholds/gpu.yaml."""
REPORTED = {
    "ttft_mean_s": "TTFT",
    "tpot_mean_s": "TPOT",
    "e2e_mean_s": "E2E",
    "output_tokens_per_s": "tokens/s",
}


class CaseRun(NamedTuple):
    """A case of a suite."""

    suite_run: SuiteRun
    case: Case

    @property
    def name(self) -> str:
        return f"{self.suite_run.suite}/{self.case.name}"


def run(record: Record) -> None:
    """Measures all cases; the summary rows of a suite follow its last case."""
    executors = ExecutorCache.of(record.device.type)
    case_runs = list(case_runs_of(record))
    record.measure("warm_up", partial(_warm_up, case_runs[0].case, executors))
    usual = case_runs[0].case.scenario.caching.block_size
    case_runs.sort(key=lambda one: one.case.scenario.caching.block_size != usual)
    for place, case_run in enumerate(case_runs):
        record.measure(
            case_run.name, partial(_run_case, record, case_run, executors), least_s=case_run.suite_run.least_s
        )
        if all(later.suite_run is not case_run.suite_run for later in case_runs[place + 1 :]):
            sum_up(record, case_run.suite_run)


def case_runs_of(record: Record) -> Iterator[CaseRun]:
    """Yields all cases; in a dry run only some."""
    device = record.device.type
    (plain,) = cases_of(composition(record), suite_of("single"), device, None)
    files = Files.under(calibrated_folder(record), machine_name(device), plain.scenario.model.name)
    for suite_run in SUITES:
        overrides, suite = suite_run.overrides, suite_of(suite_run.suite)
        if record.quick:
            overrides, names = DRY_RUN[suite_run.suite]
            suite = replace(suite, cases={name: suite.cases[name] for name in names})
        asked = composition(record, overrides)
        for case in cases_of(asked, suite, device, files):
            yield CaseRun(suite_run, case)


def _warm_up(case: Case, executors: ExecutorCache) -> dict[str, Any]:
    """Runs a case at high load without measuring it, so that kernels are compiled for large batches."""
    run_case(case._replace(settings=replace(case.settings, repeats=1, load=1.1)), executors)
    return {}


def _run_case(record: Record, case_run: CaseRun, executors: ExecutorCache) -> dict[str, Any]:
    """Runs one case, compares it with the simulator and writes its results."""
    case = case_run.case
    folder = record.folder / f"validated_{model_name(record)}" / case_run.suite_run.suite / case.name
    verdict, recordings = run_case(
        case, executors, lambda recording, number: recording.save(folder / "recordings" / str(number))
    )
    title = f"{case.scenario.model.name} on {case.scenario.hardware.name}, {case_run.name}"
    write_verdict(
        folder,
        verdict,
        title=title,
        config=case.config,
        recordings=recordings,
        page=False,  # `windtunnel validate against=` writes one from the recordings
        tables=False,
    )
    row = row_of(verdict, case.settings.load, recordings)
    return row | ({"said": _summary(row)} if case_run.suite_run.has_targets else {})


def row_of(verdict: Verdict, load: float | None, recordings: Sequence[Recording]) -> dict[str, Any]:
    """Returns the row of one case; its check is that every recorded plan was reproduced."""
    parts = verdict.decomposition
    equal, steps = verdict.num_equal, verdict.num_steps
    if parts is not None:
        equal, steps = equal + parts.num_equal, steps + parts.num_steps
    return {
        "load": load,
        "repeats": len(recordings),
        "plans": verdict.num_steps,
        "plans_equal": verdict.num_equal,
        "plans_equal_in_simulator": None if parts is None else parts.num_equal,
        "ok": equal == steps,
        "why": verdict.decisions if equal < steps else "",
        "preempted": int(recordings[0].steps["preempted"].sum()),
        "num_kv_blocks": recordings[0].engine["num_kv_blocks"],
        "figures": {one.metric.name: _figures(one) for one in verdict.fidelity.metrics},
        "parts": {} if parts is None else {part.name: dict(part.errors) for part in parts.parts},
        "notes": list(verdict.notes),
    }


def _figures(one: MetricError) -> dict[str, float | None]:
    names = ("simulated", "real", "error", "noise", "threshold")
    values = {name: getattr(one, name) for name in names}
    return {name: value if value is not None and isfinite(value) else None for name, value in values.items()}


def _summary(row: Row) -> str:
    figures = row["figures"]
    errors = [
        f"{label} {figures[name]['error']:+.1%}"
        for name, label in REPORTED.items()
        if _is_known(figures, name)
    ]
    if _is_known(figures, "iteration_median"):
        errors.append(f"iteration {figures['iteration_median']['error']:.1%}")
    return f"{row['plans_equal']} of {row['plans']} plans equal; {', '.join(errors)}"


def _is_known(figures: Mapping[str, Any], name: str) -> bool:
    return name in figures and figures[name]["error"] is not None


def sum_up(record: Record, suite_run: SuiteRun) -> None:
    """Adds the summary rows of a suite: decisions, and the worst case of each target if it has targets."""
    rows = {
        row["name"].partition("/")[2]: row
        for row in record.rows
        if row["name"].startswith(f"{suite_run.suite}/") and "figures" in row
    }
    if not rows:
        return
    record.measure(f"{suite_run.suite}: decisions", partial(_decisions, rows), least_s=0.0)
    for name in TARGETS if suite_run.has_targets else ():
        worst = worst_of(rows, name)
        if worst is not None:
            record.measure(f"{suite_run.suite}: {name}", partial(dict, worst), least_s=0.0)


def _decisions(rows: Mapping[str, Row]) -> dict[str, Any]:
    plans, equal = (sum(row[name] for row in rows.values()) for name in ("plans", "plans_equal"))
    share = equal / plans
    alike = sum(row["ok"] for row in rows.values())
    preempted = sum(row["preempted"] for row in rows.values())
    summary = f"{alike} of {len(rows)} cases equal, {equal} of {plans} plans equal, {preempted} preemptions"
    return {"target": 1.0, "reached": share, "met": share == 1.0, "said": summary}


def worst_of(rows: Mapping[str, Row], name: str) -> dict[str, Any] | None:
    """Returns the largest error of a target's metrics over all cases; None if none is known.

    At a load of 1 and more the queue grows as long as requests arrive, so TTFT has no target there.
    """
    errors = {
        (case, figure): row["figures"][figure]
        for case, row in rows.items()
        for figure in TARGETS[name]
        if _is_known(row["figures"], figure) and not (figure.startswith("ttft") and (row["load"] or 0) >= 1)
    }
    if not errors:
        return None
    (case, figure), worst = max(errors.items(), key=lambda item: abs(item[1]["error"]))
    target, error = worst["threshold"], worst["error"]
    met = abs(error) <= target
    noise = "not known" if worst["noise"] is None else f"{worst['noise']:.1%}"
    summary = f"worst {error:+.1%} ({case}, {figure}; noise {noise}); target {target:.0%}"
    return {
        "target": target,
        "reached": abs(error),
        "met": met,
        "case": case,
        "figure": figure,
        "noise": worst["noise"],
        "by_case": {f"{case} {figure}": found["error"] for (case, figure), found in errors.items()},
        "said": f"{summary}: {'met' if met else 'NOT met'}",
    }
