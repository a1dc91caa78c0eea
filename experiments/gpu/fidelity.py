"""`windtunnel calibrate` and `windtunnel validate` on the GPU: our engine measured, recorded, and simulated.

`calibrate` writes configs of hardware, engine and latency into calibrated. `validate` runs cases of suites
with them; there is one row per case, and its recordings and validation.json are in validated/SUITE/CASE. One
executor serves all cases; it is rebuilt for another block size, so those cases come last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

from experiments.app.settings.compose import Composition, ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from experiments.calibrate.engine.files import Files
from experiments.calibrate.engine.run import check, measure
from experiments.calibrate.engine.settings import MeasureSettings
from experiments.gpu.measurement import Measurement, Run
from experiments.validate.engine.on_engine import ExecutorCache, machine_name, run_case, write_verdict
from experiments.validate.engine.suite import Case, cases_of
from experiments.validate.engine.verdict import Verdict
from experiments.validate.fidelity.settings import Suite, split

LLAMA_8B = ("model=llama3_1_8b",)
SMALL_MODEL = ("model=random_8m", "model.name=tiny", "model.config.num_hidden_layers=1")
SIZES = {"max_num_seqs": 128, "max_model_len": 4096, "max_num_batched_tokens": 2048, "iterations": 12}
SMALL = {"max_num_seqs": 4, "max_model_len": 1024, "max_num_batched_tokens": 64, "budget_s": 0.5}
SMALL["iterations"] = 2
LENGTHS = ("workload.lengths.prompt_tokens.mean=512", "workload.lengths.output_tokens.mean=128")
FEW = ("workload.lengths.prompt_tokens.mean=32", "workload.lengths.output_tokens.mean=8")
METRICS = [f"{name}_mean_s" for name in ("ttft", "tpot", "e2e")] + [
    *(f"{name}_p99_s" for name in ("ttft", "tpot", "itl", "e2e")),
    *("requests_per_s", "output_tokens_per_s", "iteration_median"),
]


class Chosen(NamedTuple):
    """Cases of a suite (none named: all). judged: whether a case has enough requests to compare times."""

    suite: str
    cases: tuple[str, ...]
    overrides: tuple[str, ...]
    judged: bool = True


LOAD = Chosen("load", ("load_60",), ("repeats=1", "workload.num_requests=160", *LENGTHS))
MORE = (
    Chosen("load", (), ("repeats=2", "workload.num_requests=200", *LENGTHS)),
    Chosen("policies", (), ("repeats=1", "workload.num_requests=24"), judged=False),
    Chosen("workload_gpu", (), ("repeats=1",)),
    Chosen("speculation", ("ngram", "suffix", "eagle", "medusa"), ("repeats=1",), judged=False),
)
REHEARSED = ("load_60", "chunked", "radix", "short", "ngram")


def calibrate(run: Run) -> list[Measurement]:
    """Returns the table of Llama-3.1-8B's calibration."""
    return [Measurement("iterations", _calibrated, limit_s=170.0)]


def validate(run: Run) -> list[Measurement]:
    """Returns the table of one load on Llama-3.1-8B."""
    return _validations([LOAD], run)


def validate_more(run: Run) -> list[Measurement]:
    """Returns the table of all loads, policies and kinds of workload on Llama-3.1-8B."""
    return _validations(MORE, run)


def _composition(run: Run, overrides: Sequence[str] = ()) -> Composition:
    """Returns the composition of `windtunnel validate` with the model and the device."""
    given = [f"device={run.device.type}", "thresholds=gpu", *run.size(LLAMA_8B, SMALL_MODEL), *overrides]
    return Composition(ConfigSource(config_name="validate", dirs=[CONFIG_DIR]), given)


def suite_of(name: str) -> Suite:
    """Returns the suite of that name from the config group `suite`."""
    source = ConfigSource(config_name="validate", dirs=[CONFIG_DIR])
    return split(resolved(composed(source, ["device=cpu", f"suite={name}"])))[0].suite


def _calibrated(run: Run, _: None) -> Mapping[str, Any]:
    """Measures the tables; returns the error of the iteration times that they give, as the report has it."""
    (case, *_rest) = cases_of(_composition(run), suite_of("single"), run.device.type, None)
    settings = MeasureSettings(
        device=run.device.type,
        model=case.scenario.model,
        out=str(run.folder / "calibrated"),
        **run.size(SIZES, SMALL),
    )
    node = case.config["model"]
    check(settings, node)
    found = measure(settings, node, lambda text: print(text, flush=True))
    found.write()
    report: dict[str, Any] = json.loads(found.files.report.read_text(encoding="utf-8"))
    errors = {row["kind"]: row for row in report["errors"]}
    return {
        **{name: errors["all"][name] for name in ("median", "p90", "bias", "iterations")},
        "by_kind": errors,
        "num_operators": len(found.operators),
        "host": report["host"],
        "notes": found.notes,
    }


def _validations(chosen: Sequence[Chosen], run: Run) -> list[Measurement]:
    """Returns a measurement per case; the first one warms the engine up."""
    found: list[tuple[Chosen, Case]] = []
    for one in chosen:
        found += [(one, case) for case in cases_of_suite(one, run)]
    usual = found[0][1].scenario.caching.block_size
    found.sort(key=lambda pair: pair[1].scenario.caching.block_size != usual)
    engine = partial(_executors, found[0][1])
    return [
        Measurement(f"{one.suite}/{case.name}", partial(_validated, one, case), engine, limit_s=80.0)
        for one, case in found
    ]


def cases_of_suite(one: Chosen, run: Run) -> list[Case]:
    """Returns the cases of a suite on the machine that `calibrate` has measured; in a rehearsal only some."""
    device, suite, overrides = run.device.type, suite_of(one.suite), one.overrides
    (plain,) = cases_of(_composition(run), suite_of("single"), device, None)
    files = Files.under(run.folder / "calibrated", machine_name(device), plain.scenario.model.name)
    names = one.cases or tuple(suite.cases)
    if run.rehearse:
        names, overrides = REHEARSED, ("repeats=1", "workload.num_requests=6", *FEW)
    suite = replace(suite, cases={name: own for name, own in suite.cases.items() if name in names})
    return cases_of(_composition(run, overrides), suite, device, files)


@contextmanager
def _executors(first: Case, run: Run) -> Iterator[ExecutorCache]:
    """Yields the executors, after a run at high load, so that kernels are compiled for large batches."""
    executors = ExecutorCache.of(run.device.type)
    run_case(first._replace(settings=replace(first.settings, repeats=1, load=1.1)), executors)
    yield executors


def _validated(one: Chosen, case: Case, run: Run, executors: ExecutorCache) -> Mapping[str, Any]:
    """Runs one case, compares it with the simulator and writes its results."""
    folder = run.folder / "validated" / one.suite / case.name
    verdict, recordings = run_case(
        case, executors, lambda recording, number: recording.save(folder / "recordings" / str(number))
    )
    write_verdict(
        folder,
        verdict,
        title=f"{case.scenario.model.name} on {case.scenario.hardware.name}, {one.suite}/{case.name}",
        config=case.config,
        recordings=recordings,
        page=False,  # `windtunnel validate against=` writes one from the recordings
        tables=False,
    )
    about = {
        "load": case.settings.load,
        "repeats": len(recordings),
        "preempted": int(recordings[0].steps["preempted"].sum()),
        "num_kv_blocks": recordings[0].engine["num_kv_blocks"],
    }
    return about | row_of(verdict, case.settings.load, judged=one.judged)


def row_of(verdict: Verdict, load: float | None, *, judged: bool) -> dict[str, Any]:
    """Returns the share of equal decisions, and the absolute error of each metric if times are judged.

    At a load of 1 and more the queue grows as long as requests arrive, so TTFT is not judged there.
    """
    parts = verdict.decomposition
    equal, steps = verdict.num_equal, verdict.num_steps
    if parts is not None:
        equal, steps = equal + parts.num_equal, steps + parts.num_steps
    figures = {one.metric.name: one for one in verdict.fidelity.metrics}
    errors = {
        name: abs(figures[name].error)
        for name in METRICS
        if judged and name in figures and not (name.startswith("ttft") and (load or 0) >= 1)
    }
    names = ("simulated", "real", "error", "noise")
    return {
        "plans": verdict.num_steps,
        "plans_equal": verdict.num_equal,
        "decisions": equal / steps if steps else 0.0,
        "ok": equal == steps,
        "why": verdict.decisions if equal < steps else "",
        **{name: error for name, error in errors.items() if isfinite(error)},
        "figures": {name: {each: getattr(one, each) for each in names} for name, one in figures.items()},
        "parts": {} if parts is None else {part.name: dict(part.errors) for part in parts.parts},
        "notes": list(verdict.notes),
    }
