"""States how far the simulated figures of a run are expected to be from measured ones, and why.

The errors are those of `hwmodels.trust.table`: of rows that were left out when host times were fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwmodels.levels.rooflines import Calibrated, Spec
from hwmodels.trust.lookup import Place, errors_at
from hwmodels.trust.table import ALL_GPUS, ExpectedError, Level, shipped
from policies.core.policy_names import name_of
from sim.setup.pool import PoolSettings
from sim.workload.arrivals import ClosedLoop
from sim.workload.base import Workload

PREFIX = "Expected error"
"""Beginning of the note."""

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
BATCHING = {"vllm": "chunked", "sglang": "sglang", "tensorrt_llm": "inflight"}
"""Batching policy with which the rows of an engine were simulated."""
SCHEDULING = ("fcfs", "queue_order")
"""Scheduling policies with which rows were simulated."""
MODELS = {"dense": "dense models", "moe": "mixtures of experts"}
SHOWN = {
    "open": ("TTFT", "TTFT p99", "ITL", "E2E", "E2E p99"),
    "closed": ("TTFT", "TPOT", "E2E", "throughput"),
}
"""Figures of the note by kind of traffic."""


def is_closed(workload: Workload) -> bool:
    """Returns whether a fixed number of clients sends the requests."""
    return isinstance(getattr(workload, "arrivals", None), ClosedLoop)


def expected_error_note(pool: PoolSettings, workload: Workload) -> str:
    """Returns the note on the expected errors of a pool's figures, or on why they are unknown."""
    reason = unknown_because(pool)
    if reason:
        return f"{PREFIX}: unknown; {reason}."
    errors = figures_of(pool, closed=is_closed(workload))
    texts = [f"{_figures(rows)} ({_basis(pool, rows)})" for rows in errors]
    lacks = never_compared(pool)
    more = f" Never compared: {', '.join(lacks)}." if lacks else ""
    return f"{PREFIX} (half of the cases / nine in ten are within): {'; '.join(texts)}.{more}"


def expected_errors_json(pool: PoolSettings, workload: Workload) -> dict[str, Any]:
    """Returns the expected errors for summary.json; `unknown` is the reason if there are none."""
    reason = unknown_because(pool)
    errors = [] if reason else figures_of(pool, closed=is_closed(workload))
    return {
        "unknown": reason or None,
        "never_compared": never_compared(pool),
        "figures": {
            figure: {
                "median_percent": row.median_percent,
                "p90_percent": row.p90_percent,
                "level": row.level.value,
                "traffic": row.traffic,
                "gpu": None if row.gpu == ALL_GPUS else row.gpu,
                "engine": row.engine,
                "architecture": row.architecture,
                "rows": row.rows,
                "groups": row.groups,
            }
            for rows in errors
            for figure, row in rows.items()
        },
    }


def place_of(pool: PoolSettings) -> Place:
    """Returns the place of a pool in the table."""
    measured_on = pool.calibration.measured_on
    return Place(
        engine=pool.engine.family or "",
        gpu=pool.hardware.name,
        architecture="moe" if pool.model.has_experts else "dense",
        level=Level.measured if measured_on == pool.hardware.name else Level.relative,
    )


def unknown_because(pool: PoolSettings) -> str:
    """Returns why nothing is known about the errors of a pool's figures; empty if something is."""
    if isinstance(pool.latency, Spec):
        return "latency=spec was never compared with measured engines"
    if not isinstance(pool.latency, Calibrated):
        name = name_of(pool.latency).removesuffix("_level")
        return (
            f"figures with latency={name} were never compared with measured engines here; "
            "windtunnel validate compares them with yours"
        )
    if pool.engine.family is None:
        return "this engine profile was never compared with measurements"
    if pool.calibration.measured_on is None:
        return f"neither {pool.hardware.name} nor a relative of it was ever measured"
    place = place_of(pool)
    if not any(errors_at(shipped(), place, traffic) for traffic in SHOWN):
        models, engine = MODELS[place.architecture], ENGINES.get(place.engine, place.engine)
        return f"{models} with {engine} were never compared with measurements"
    return ""


def never_compared(pool: PoolSettings) -> list[str]:
    """Returns the features of a pool that no row behind its figures has."""
    batching = BATCHING.get(pool.engine.family or "")
    found = {
        "LoRA adapters": pool.lora is not None or pool.adapters is not None,
        "speculative decoding": pool.speculation is not None,
        "pipeline parallelism": pool.pipeline_parallel_size > 1,
        "context parallelism": pool.context_parallel_size > 1,
        "sequence parallelism": pool.sequence_parallel,
        f"caching={name_of(pool.caching)}": pool.caching.changes_outputs or any(pool.caching.tiers_gib),
        "preemption by swapping": pool.scheduling.preemption_mode == "swap",
        "disaggregated prefill and decode": pool.role != "mixed",
        f"batching={name_of(pool.batching)}": pool.role == "mixed" and name_of(pool.batching) != batching,
        f"scheduling={name_of(pool.scheduling)}": name_of(pool.scheduling) not in SCHEDULING,
    }
    return [name for name, is_used in found.items() if is_used]


def figures_of(pool: PoolSettings, *, closed: bool) -> list[Mapping[str, ExpectedError]]:
    """Returns the rows of the figures that a run prints, by source: those of its own kind of traffic first.

    Throughput was measured at a fixed number of clients only.
    """
    place = place_of(pool)
    by_traffic = {
        traffic: {name: row for name, row in errors_at(shipped(), place, traffic).items() if name in figures}
        for traffic, figures in SHOWN.items()
    }
    own = by_traffic["closed" if closed else "open"]
    if closed or not own:
        return [by_traffic["closed"] or own or by_traffic["open"]]
    rest = {name: row for name, row in by_traffic["closed"].items() if name == "throughput"}
    return [own, rest] if rest else [own]


def _figures(rows: Mapping[str, ExpectedError]) -> str:
    return ", ".join(
        f"{figure} {_percent(row.median_percent)} / {_percent(row.p90_percent)} %"
        for figure, row in rows.items()
    )


def _percent(value: float) -> str:
    return f"{value:.0f}" if value >= 9.5 else f"{value:.2g}"


def _basis(pool: PoolSettings, rows: Mapping[str, ExpectedError]) -> str:
    """Returns the rows behind the figures: 93 configurations of dense models on H100 SXM with vLLM."""
    row = max(rows.values(), key=lambda one: one.rows)
    kind = "open-loop runs" if row.traffic == "open" else "configurations"
    what = f"{row.rows:,} {kind} of {MODELS[row.architecture]} with {ENGINES.get(row.engine, row.engine)}"
    if row.level is Level.relative:
        return (
            f"{pool.hardware.name} was never measured: {what} on {row.groups} measured GPUs, each simulated "
            "as if it had not been measured"
        )
    if row.gpu == ALL_GPUS:
        return f"measured on other GPUs than {pool.hardware.name}: {what}"
    return f"measured: {what} on {row.gpu}"
