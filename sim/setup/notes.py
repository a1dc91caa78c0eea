"""Notes in the summary of a run: the basis of its metrics, their expected errors, and limits of its settings.

An expected error says how far the simulated metrics are from measured ones, and why. The errors come from
`hwmodels.trust`: from rows that were held out when host times were fitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hwmodels.iterations import IterationModel, IterationShape, UnknownIterationError
from hwmodels.levels import Calibrated, Spec
from hwmodels.model import ModelSpec, precision_notes
from hwmodels.model.attention import CompressedAttention, GroupedQueryAttention
from hwmodels.model.recurrent import (
    BesideAttention,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    ShortConvolution,
)
from hwmodels.trust import (
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
from policies.batching.inflight import GUARANTEED_NO_EVICT, InFlight
from policies.caching.content import FutureUses
from policies.caching.pool import pool_of
from policies.user_code import name_of
from sim.cluster.disaggregation import EncoderSettings
from sim.metrics.slo import Slo
from sim.report.wording import plural
from sim.setup.combinations import delayer_note, ranks_note
from sim.setup.deployment import max_tokens_per_pass, speculation_notes
from sim.setup.pool import PoolSettings
from sim.transfer.kv_transfers import resharding
from sim.workload.arrivals import AllAtOnce, ClosedLoop
from sim.workload.base import Workload, WorkloadNotes
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
"""Metrics of the note by kind of traffic."""
NEAREST = {
    "open": ("open", "closed", "burst"),
    "closed": ("closed", "burst", "open"),
    "burst": ("burst", "closed", "open"),
}
"""Kinds of traffic to try, in this order, for the kind of a run; the first one that was compared is shown."""
RUNS = {
    "open": "open-loop run",
    "closed": "closed-loop run",
    "burst": "burst",
    "lora": "comparison with adapters",
}
MANY_RUNS = {"lora": "comparisons with and without adapters"}
"""Irregular plurals of `RUNS`."""
TAIL = "TTFT p99"
LEAST_HELD_BACK, MOST_HELD_BACK = 0.001, 0.05
"""Shares of requests that waited for a sequence slot or KV memory between which `HELD_BACK` applies.

The TTFT p99 depends on whether the share exceeds 1 %. In simulations of one measured run that differ only in
their seed it is 0.1 to 4 %. No measured run had a larger share.
"""


def traffic_of(workload: Workload) -> str:
    """Returns the kind of traffic of a workload, as `TRAFFIC` names it.

    Independent requests that are all sent at 0 s, or by at least as many clients, are a burst. Sessions that
    begin together are not a burst: each of their requests waits for the previous one, as in a closed loop.
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
    """Returns the table metric for a run's TTFT p99: `TAIL`, `HELD_BACK`, or None for neither.

    held_back_share: the share of requests that waited for a sequence slot or KV memory; None: unknown.
    """
    if held_back_share is None or not held_back_share >= LEAST_HELD_BACK:
        return TAIL
    return HELD_BACK if held_back_share <= MOST_HELD_BACK else None


def expected_error_note(pool: PoolSettings, workload: Workload, held_back_share: float | None = None) -> str:
    """Returns the note on the expected errors of a pool's metrics, or on why they are unknown.

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
    """Returns why the errors of a pool's metrics are unknown; empty if they are known."""
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
    """Returns the features of a pool that are in no measured row of its metrics."""
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
    """Returns the kinds of layers of a model that are in no compared model."""
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
    """Returns the rows of the metrics that a run prints, by their basis.

    traffic: the kind of the run, whose rows are preferred; rows of another kind are used if there are none.
    The throughput of an open loop uses closed-loop rows. With LoRA adapters, the rows of the remaining share
    of the throughput come last. tail: see `tail_of`.
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
    """Returns the error of the share of the throughput that remains with adapters; empty if not compared.

    Only rows of the pool's own engine are used, because adapter kernels differ more between engines than
    other kernels.
    """
    place = place_of(pool)
    rows = errors_at(shipped(), place, "lora")
    return {name: row for name, row in rows.items() if name == LORA and row.engine == place.engine}


def _shown(place: Place, traffic: str, tail: str | None) -> dict[str, ExpectedError]:
    """Returns the rows of the metrics in `SHOWN`; the row of the metric `tail` is the one for TTFT p99.

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

    The result is empty if few waited, or if the rows' kind of traffic has no TTFT p99.
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
    """Returns a text on the rows, such as: 93 closed-loop runs in 3 groups of dense models with vLLM."""
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


FEW_REQUESTS = 32
"""Number of running requests below which a note says that each reserves KV for the longest output."""


def pool_notes(
    pool: PoolSettings,
    model: IterationModel,
    slo: Slo | None,
    workload: Workload,
    held_back_share: float | None = None,
) -> Iterator[str]:
    """Yields the notes on the metrics of a pool. held_back_share: see `expected_error_note`."""
    basis, jitter = pool.latency.basis(pool.replica), pool.jitter
    yield basis if jitter is None else f"{basis} {jitter.sentence}"
    yield expected_error_note(pool, workload, held_back_share)
    yield from pool.layout_notes
    yield from pool.model.notes
    if note := delayer_note(pool.batching, pool.layout, pool.latency):
        yield note
    if pool.data_parallel is not None:
        yield ranks_note(pool.data_parallel, pool.engine, pool.batching)
        if pool.adapters is not None:
            yield (
                f"The {pool.data_parallel.size} ranks of data-parallel attention share the adapters in GPU "
                "memory; in vLLM each rank has slots of its own, so that fewer requests wait for an adapter."
            )
    yield from precision_notes(pool.model, pool.hardware)
    if pool.speculation is not None:
        yield from speculation_notes(pool.speculation, pool.acceptance, pool.engine.host)
    yield from _limits(pool, model, slo)
    yield from _reserved(pool, workload)
    if pool.caching.changes_outputs:
        yield (
            f"caching={name_of(pool.caching)}: drops KV that the model would attend to, so outputs "
            f"change; {pool.caching.quality_note}."
        )


def _limits(pool: PoolSettings, model: IterationModel, slo: Slo | None) -> Iterator[str]:
    """Yields notes on latencies and contexts that are impossible with these settings."""
    limits_s = slo.limits_s if slo and pool.jitter is None else {}  # with jitter, any iteration may be short
    for term, least_s in _lone_seconds(model, max_tokens_per_pass(pool.speculation)).items():
        if term in limits_s and limits_s[term] < least_s:
            yield (
                f"slo.{term}_ms={limits_s[term] * 1e3:g}: cannot be met, "
                f"as a single short request alone takes {least_s * 1e3:.3g} ms"
            )
    num_blocks = pool.plan_memory().num_blocks // pool.num_ranks
    kv_pool = pool_of(pool.caching, pool.kv_memory(num_blocks, FutureUses(())))
    num_tokens = kv_pool.max_tokens_per_seq
    if num_tokens < pool.max_model_len:
        yield (
            f"The KV cache holds at most {num_tokens:,} tokens per sequence, less than the context of "
            f"{pool.max_model_len:,}: longer prompts are rejected, longer outputs are cut off.{_start(pool)}"
        )


def _reserved(pool: PoolSettings, workload: Workload) -> Iterator[str]:
    """Yields a note if few requests run at once because each reserves KV for the rest of the context."""
    batching = pool.batching
    if not isinstance(batching, InFlight) or batching.capacity_scheduler_policy != GUARANTEED_NO_EVICT:
        return
    if isinstance(workload, Synthetic) and workload.max_tokens is not None:
        return
    memory = pool.plan_memory()
    most = memory.num_blocks * pool.caching.block_size // pool.max_model_len
    if most < min(FEW_REQUESTS, pool.engine.max_num_seqs):
        yield (
            f"batching.capacity_scheduler_policy={GUARANTEED_NO_EVICT}: a request without max_tokens "
            f"reserves KV for the whole context of {pool.max_model_len:,} tokens, so about {max(1, most)} "
            "run at once; "
            "set workload.max_tokens=exact or engine.max_model_len, or choose max_utilization."
        )


def _start(pool: PoolSettings) -> str:
    """Returns a sentence on the flag without which vLLM does not start with so little KV memory."""
    plan = pool.plan_memory()
    longest = pool.longest_sequence(plan)
    if pool.engine.memory_profile != "vllm" or longest >= pool.max_model_len:
        return ""
    return (
        f" vLLM starts like this with --max-model-len {longest} (engine.max_model_len) or auto only: "
        f"{pool.kv_shortage(plan, pool.max_model_len)}."
    )


def _lone_seconds(model: IterationModel, tokens_per_pass: int) -> dict[str, float]:
    """Returns the minimum TTFT and TPOT in seconds; empty if a recorded model lacks these iterations."""
    try:
        ttft_s = float(model.seconds(IterationShape(0, 0, 1, 1, 1, 1, 1)))
        return {"ttft": ttft_s, "tpot": model.decode_ends(0.0, 1, 2, 1)[0] / tokens_per_pass}
    except UnknownIterationError:
        return {}


def resharding_notes(pools: Mapping[str, PoolSettings]) -> Iterator[str]:
    """Yields notes on KV transfers between pools with different layouts."""
    for name, source in pools.items():
        for other, target in pools.items():
            is_pair = source.role == "prefill" and target.role != "prefill"
            if not is_pair or source.model != target.model or source.kv_layout == target.kv_layout:
                continue
            copies = resharding(source.kv_layout, target.kv_layout)
            num_gpus = source.kv_layout.num_ranks
            yield (
                f"KV from pool {name} to pool {other}: {copies.num_senders} of {num_gpus} GPUs send "
                f"{copies.num_copies} parts to {target.kv_layout.num_ranks} GPUs, a block in "
                f"{copies.slices_per_block:,} messages."
            )


def encoder_notes(encoders: EncoderSettings, pool: PoolSettings) -> Iterator[str]:
    """Yields a note on the encoders of images, if there are any."""
    if encoders.replicas:
        encode_s = encoders.encode_s(pool.hardware)
        yield (
            f"{encoders.replicas} {pool.hardware.name} encode images in {encode_s * 1e3:.3g} ms each, "
            f"at most {encoders.replicas / encode_s:,.0f} per second; the cost is without these GPUs."
        )


def workload_notes(notes: WorkloadNotes) -> Iterator[str]:
    """Yields notes on how the traffic differs from its source: omitted rows, shortened requests."""
    yield from notes.remarks
    for reason, count in notes.skipped.items():
        yield f"{count:,} skipped: {reason}."
    if notes.num_clipped:
        was = "request was" if notes.num_clipped == 1 else "requests were"
        yield f"{notes.num_clipped:,} {was} truncated to the model's context length."
    if notes.num_conversations_cut:
        noun = "conversation" if notes.num_conversations_cut == 1 else "conversations"
        yield f"{notes.num_conversations_cut:,} {noun} ended early, as the context was full."
