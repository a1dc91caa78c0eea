"""Notes in the summary of a run: the basis of its figures, and limits that its settings imply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hwmodels.iterations.iteration import IterationModel, IterationShape, UnknownIterationError
from hwmodels.model.precision import precision_notes
from policies.batching.inflight import GUARANTEED_NO_EVICT, InFlight
from policies.caching.content import FutureUses
from policies.caching.pool import pool_of
from policies.user_code import name_of
from sim.cluster.encoders import EncoderSettings
from sim.metrics.slo import Slo
from sim.setup.combinations import delayer_note, ranks_note
from sim.setup.deployment import max_tokens_per_pass, speculation_notes
from sim.setup.expected_errors import expected_error_note
from sim.setup.pool import PoolSettings
from sim.transfer.kv_copy import resharding
from sim.workload.base import Workload, WorkloadNotes
from sim.workload.synthetic import Synthetic

FEW_REQUESTS = 32
"""Requests at once, below which a run says that each of them reserves KV for the longest output."""


def pool_notes(
    pool: PoolSettings,
    model: IterationModel,
    slo: Slo | None,
    workload: Workload,
    held_back_share: float | None = None,
) -> Iterator[str]:
    """Yields the notes on the figures of a pool. held_back_share: see `expected_error_note`."""
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
    """Yields notes on what these settings rule out: latencies, contexts."""
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
    """Yields a note if few requests run at once, as each reserves KV for the rest of the context."""
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
    """Returns the minimum TTFT and TPOT in seconds; empty if a replaying model lacks these iterations."""
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
    """Yields notes on how the traffic differs from its source: rows left out, requests shortened."""
    yield from notes.remarks
    for reason, count in notes.skipped.items():
        yield f"{count:,} skipped: {reason}."
    if notes.num_clipped:
        was = "request was" if notes.num_clipped == 1 else "requests were"
        yield f"{notes.num_clipped:,} {was} truncated to the model's context length."
    if notes.num_conversations_cut:
        noun = "conversation" if notes.num_conversations_cut == 1 else "conversations"
        yield f"{notes.num_conversations_cut:,} {noun} ended early, as the context was full."
