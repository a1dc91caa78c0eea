"""States how far the simulated figures of a run are expected to be from measured ones, and why.

The errors are those of `hwmodels.trust.table`: of rows that were left out when host times were fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwmodels.levels.rooflines import Calibrated, Spec
from hwmodels.model.attention import CompressedAttention, GroupedQueryAttention
from hwmodels.model.model_spec import ModelSpec
from hwmodels.model.recurrent import (
    BesideAttention,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    ShortConvolution,
)
from hwmodels.trust.table import (
    ALL_ENGINES,
    ALL_GPUS,
    ARCHITECTURES,
    HELD_BACK,
    LORA,
    ExpectedError,
    Level,
    Place,
    errors_at,
    is_compared,
    shipped,
)
from policies.user_code import name_of
from sim.report.wording import plural
from sim.setup.pool import PoolSettings
from sim.workload.arrivals import AllAtOnce, ClosedLoop
from sim.workload.base import Workload
from sim.workload.synthetic import Synthetic

PREFIX = "Expected error"
"""Beginning of the note."""

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
BATCHING = {"vllm": "chunked", "sglang": "sglang", "tensorrt_llm": "inflight"}
"""Batching policy with which the rows of an engine were simulated."""
SCHEDULING = ("fcfs", "queue_order")
"""Scheduling policies with which rows were simulated."""
STATE_SPACE = (BesideAttention, KimiDeltaAttention, LightningAttention, Mamba1, Mamba2, ShortConvolution)
MODELS = {"dense": "dense models", "moe": "mixtures of experts"}
SHOWN = {
    "open": ("TTFT", "ITL", "E2E", "TTFT p99", "E2E p99"),
    "closed": ("TTFT", "TPOT", "E2E", "throughput"),
    "burst": ("TTFT", "TPOT", "E2E", "throughput", "TTFT p99"),
}
"""Figures of the note by kind of traffic."""
NEAREST = {
    "open": ("open", "closed", "burst"),
    "closed": ("closed", "burst", "open"),
    "burst": ("burst", "closed", "open"),
}
"""Kinds of traffic of which the first one that was compared is shown, by the kind of a run."""
RUNS = {
    "open": "open-loop run",
    "closed": "closed-loop run",
    "burst": "burst",
    "lora": "comparison with adapters",
}
MANY_RUNS = {"lora": "comparisons with and without adapters"}
"""Plurals that are not those of `RUNS` with an s."""
TAIL = "TTFT p99"
LEAST_HELD_BACK, MOST_HELD_BACK = 0.001, 0.05
"""Shares of requests that waited for a sequence slot or KV memory between which `HELD_BACK` applies.

The TTFT p99 depends on whether the share exceeds 1 %. In simulations of one measured run that differ in their
seed only it is 0.1 to 4 %. No measured run had a larger share.
"""


def traffic_of(workload: Workload) -> str:
    """Returns the kind of traffic of a workload, as `TRAFFIC` names it.

    Independent requests that are all sent at 0 s, or by at least as many clients, are a burst. Sessions
    that begin together are not: each of their requests waits for the last one, as in a closed loop.
    """
    while (inner := getattr(workload, "of", None)) is not None:
        workload = inner
    arrivals = getattr(workload, "arrivals", None)
    if isinstance(arrivals, ClosedLoop):
        requests = workload.num_requests if isinstance(workload, Synthetic) else None
        is_burst = requests is not None and requests <= arrivals.num_users and not arrivals.ramp_up_s
        return "burst" if is_burst else "closed"
    if isinstance(arrivals, AllAtOnce):
        return "closed" if hasattr(workload, "think_time_s") else "burst"
    return "open"


def tail_of(held_back_share: float | None) -> str | None:
    """Returns the figure of the table that is a run's TTFT p99: `TAIL`, `HELD_BACK`, or None for neither.

    held_back_share: the share of requests that waited for a sequence slot or KV memory; None: unknown.
    """
    if held_back_share is None or not held_back_share >= LEAST_HELD_BACK:
        return TAIL
    return HELD_BACK if held_back_share <= MOST_HELD_BACK else None


def expected_error_note(pool: PoolSettings, workload: Workload, held_back_share: float | None = None) -> str:
    """Returns the note on the expected errors of a pool's figures, or on why they are unknown.

    held_back_share: see `tail_of`.
    """
    reason = unknown_because(pool)
    if reason:
        return f"{PREFIX}: unknown; {reason}."
    errors = figures_of(pool, traffic_of(workload), tail_of(held_back_share))
    texts = [f"{_figures(rows)} ({_basis(pool, rows)})" for rows in errors]
    lacks = never_compared(pool)
    more = f" Never compared: {', '.join(lacks)}." if lacks else ""
    tail = _tail_note(pool, {name: row for rows in errors for name, row in rows.items()}, held_back_share)
    return f"{PREFIX} (median / p90): {'; '.join(texts)}.{tail}{more}"


def expected_errors_json(
    pool: PoolSettings, workload: Workload, held_back_share: float | None = None
) -> dict[str, Any]:
    """Returns the expected errors for summary.json; `unknown` is the reason if there are none."""
    reason = unknown_because(pool)
    tail = tail_of(held_back_share)
    errors = [] if reason else figures_of(pool, traffic_of(workload), tail)
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
                "engine": None if row.engine == ALL_ENGINES else row.engine,
                "architecture": row.architecture,
                "rows": row.rows,
                "groups": row.groups,
                "basis_groups": row.basis_groups or row.groups,
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
    if not is_compared(shipped(), place):
        models, engine = MODELS[place.architecture], ENGINES.get(place.engine, place.engine)
        return f"{models} with {engine} were never compared with measurements"
    return ""


def never_compared(pool: PoolSettings) -> list[str]:
    """Returns the features of a pool that no row behind its figures has."""
    batching = BATCHING.get(pool.engine.family or "")
    found = {
        "models of an architecture that is not known": pool.model.read_by_fields,
        **dict.fromkeys(kinds_never_compared(pool.model), True),
        "LoRA adapters": _has_lora(pool) and not lora_errors(pool),
        "speculative decoding": pool.speculation is not None,
        "tensor parallelism between nodes": pool.tensor_parallel_size > pool.hardware.gpus_per_node,
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


def kinds_never_compared(model: ModelSpec) -> list[str]:
    """Returns the kinds of layers of a model that no compared model has."""
    mixers = [block.attention for block in model.blocks]
    selecting = [mixer for mixer in mixers if isinstance(mixer, GroupedQueryAttention) and mixer.sparse_top_k]
    found = {
        "state-space layers": any(isinstance(mixer, STATE_SPACE) for mixer in mixers),
        "attention to compressed entries": any(isinstance(mixer, CompressedAttention) for mixer in mixers),
        "attention to selected blocks": bool(selecting),
    }
    return [name for name, is_found in found.items() if is_found]


def figures_of(
    pool: PoolSettings, traffic: str, tail: str | None = TAIL
) -> list[Mapping[str, ExpectedError]]:
    """Returns the rows of the figures that a run prints, by what they rest on.

    traffic: the kind of the run, whose rows come first; those of another kind take their place if there are
    none. The throughput of an open loop is that of closed ones. With LoRA adapters, those of the throughput
    that they leave come last. tail: see `tail_of`.
    """
    place = place_of(pool)
    by_traffic = {kind: _shown(place, kind, tail) for kind in SHOWN}
    rows = next((by_traffic[kind] for kind in NEAREST[traffic] if by_traffic[kind]), {})
    if traffic == "open" and "throughput" not in rows and "throughput" in by_traffic["closed"]:
        rows = {**rows, "throughput": by_traffic["closed"]["throughput"]}
    if _has_lora(pool):
        rows = {**rows, **lora_errors(pool)}
    found: dict[tuple[str, str, str], dict[str, ExpectedError]] = {}
    for name, row in rows.items():
        found.setdefault((row.traffic, row.engine, row.gpu), {})[name] = row
    return list(found.values())


def _has_lora(pool: PoolSettings) -> bool:
    return pool.lora is not None or pool.adapters is not None


def lora_errors(pool: PoolSettings) -> dict[str, ExpectedError]:
    """Returns the error of the share of the throughput that adapters leave; empty if none was compared.

    Of the pool's own engine only: engines' kernels of adapters differ more than their others.
    """
    place = place_of(pool)
    rows = errors_at(shipped(), place, "lora")
    return {name: row for name, row in rows.items() if name == LORA and row.engine == place.engine}


def _shown(place: Place, traffic: str, tail: str | None) -> dict[str, ExpectedError]:
    """Returns the rows of the figures in `SHOWN`; the row of the figure `tail` is that of the TTFT p99.

    In a burst most requests wait, so its TTFT p99 is always `TAIL`.
    """
    tail = TAIL if traffic == "burst" else tail
    rows = errors_at(shipped(), place, traffic)
    if tail in rows:
        rows[TAIL] = rows[tail]
    elif tail != TAIL:
        rows.pop(TAIL, None)
    return {name: rows[name] for name in SHOWN[traffic] if name in rows}


def _tail_note(pool: PoolSettings, rows: Mapping[str, ExpectedError], share: float | None) -> str:
    """Returns why the error of the TTFT p99 is large or unknown if this share of the requests waited.

    Empty if few waited, and if the rows are of a kind of traffic without a TTFT p99.
    """
    tail = tail_of(share)
    if share is None or tail == TAIL or all(row.traffic != "open" for row in rows.values()):
        return ""
    waited = f"{100 * share:.2g} % of the requests waited for a sequence slot or KV memory"
    if tail is None:
        return f" {TAIL}: unknown, as {waited}, more than in any measured run."
    depends = (
        "Whether more than 1 % do depends on the seed and on a few percent of load, and the p99 with it."
    )
    if TAIL in rows:
        return f" {TAIL} is of the {rows[TAIL].rows} runs at such a limit, as {waited}. {depends}"
    place = place_of(pool)
    others = [place._replace(architecture=name) for name in ARCHITECTURES if name != place.architecture]
    known = [
        f"; of {MODELS[other.architecture]} it is {_figures({TAIL: row})}"
        for other in others
        if (row := _shown(other, "open", HELD_BACK).get(TAIL)) is not None
    ]
    return (
        f" {TAIL}: unknown, as {waited}, and no such run of {MODELS[place.architecture]} was measured"
        f"{''.join(known)}. {depends}"
    )


def _figures(rows: Mapping[str, ExpectedError]) -> str:
    return ", ".join(
        f"{figure} {_percent(row.median_percent)} / {_percent(row.p90_percent)} %"
        for figure, row in rows.items()
    )


def _percent(value: float) -> str:
    return f"{value:.0f}" if value >= 9.5 else f"{value:.2g}"


def _basis(pool: PoolSettings, rows: Mapping[str, ExpectedError]) -> str:
    """Returns the rows behind the figures: 93 closed-loop runs in 3 groups of dense models with vLLM."""
    row = max(rows.values(), key=lambda one: one.rows)
    own = place_of(pool).engine
    engine = ENGINES.get(row.engine, row.engine)
    if row.engine == ALL_ENGINES:
        engine = f"all engines and GPUs, as such runs of {ENGINES.get(own, own)} were not compared"
    runs = plural(row.rows, RUNS[row.traffic], MANY_RUNS.get(row.traffic))
    what = f"{runs} in {plural(row.groups, 'group')} of {MODELS[row.architecture]} with {engine}"
    wider = f"; too few groups, so not narrower than for {row.basis_groups} groups" if row.is_widened else ""
    if row.level is Level.relative:
        return (
            f"{pool.hardware.name} was never measured: {what}, on GPUs that were simulated without "
            f"measurements of their own{wider}"
        )
    if row.engine == ALL_ENGINES:
        return f"measured: {what}{wider}"
    if row.gpu == ALL_GPUS:
        return f"measured on other GPUs than {pool.hardware.name}: {what}{wider}"
    return f"measured: {what} on {row.gpu}{wider}"
