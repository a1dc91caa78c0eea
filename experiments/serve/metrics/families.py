"""The metrics of an engine: name, description, and value.

Names, labels and meanings are those of vLLM 0.32. Counters get the ending _total on the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from experiments.serve.metrics.engine import EngineMetrics, EngineState
from experiments.serve.metrics.histogram import Histogram

Values = list[tuple[tuple[str, ...], float]]
"""Values of further labels, with the number that they have."""


class Family(NamedTuple):
    """A gauge or a counter: its numbers, one per combination of `labels` beside model_name and engine."""

    name: str
    help: str
    values: Callable[[EngineMetrics, EngineState], Values]
    labels: tuple[str, ...] = ()


class HistogramFamily(NamedTuple):
    """A histogram. is_time: whether its values are seconds of the back end's clock."""

    name: str
    help: str
    histogram: Callable[[EngineMetrics], Histogram]
    is_time: bool = True


def _number(read: Callable[[EngineMetrics, EngineState], float]) -> Callable[..., Values]:
    return lambda engine, state: [((), read(engine, state))]


def _waiting_by_reason(engine: EngineMetrics, state: EngineState) -> Values:
    return [(("capacity",), state.num_waiting), (("deferred",), state.num_deferred)]


def _accepted_by_place(engine: EngineMetrics, state: EngineState) -> Values:
    accepted = engine.drafts.accepted_by_place if engine.drafts is not None else []
    return [((str(place),), num_accepted) for place, num_accepted in enumerate(accepted)]


def _of_drafts(name: str) -> Callable[..., Values]:
    return lambda engine, state: [] if engine.drafts is None else [((), getattr(engine.drafts, name))]


GAUGES = (
    Family(
        "vllm:num_requests_running",
        "Number of requests in the batch of the engine.",
        _number(lambda engine, state: state.num_running),
    ),
    Family(
        "vllm:num_requests_waiting",
        "Number of requests that wait to be scheduled.",
        _number(lambda engine, state: state.num_waiting + state.num_deferred),
    ),
    Family(
        "vllm:num_requests_waiting_by_reason",
        "Number of waiting requests: capacity (a slot or KV memory), deferred (KV or an adapter is loaded).",
        _waiting_by_reason,
        ("reason",),
    ),
    Family(
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache in use; 1 is all of it.",
        _number(lambda engine, state: state.kv_cache_usage),
    ),
    Family(
        "vllm:gpu_cache_usage_perc",
        "The former name of vllm:kv_cache_usage_perc.",
        _number(lambda engine, state: state.kv_cache_usage),
    ),
)

COUNTERS = (
    Family(
        "vllm:num_preemptions",
        "Number of preemptions.",
        _number(lambda engine, state: state.num_preemptions),
    ),
    Family(
        "vllm:prefix_cache_queries",
        "Tokens of prompts that were looked up in the prefix cache.",
        _number(lambda engine, state: engine.prefix_queries),
    ),
    Family(
        "vllm:prefix_cache_hits",
        "Tokens of prompts that were found in the prefix cache.",
        _number(lambda engine, state: engine.prefix_hits),
    ),
    Family(
        "vllm:gpu_prefix_cache_queries",
        "The former name of vllm:prefix_cache_queries.",
        _number(lambda engine, state: engine.prefix_queries),
    ),
    Family(
        "vllm:gpu_prefix_cache_hits",
        "The former name of vllm:prefix_cache_hits.",
        _number(lambda engine, state: engine.prefix_hits),
    ),
    Family(
        "vllm:external_prefix_cache_queries",
        "Tokens of prompts that were looked up in other memory or in another engine.",
        _number(lambda engine, state: engine.external_queries),
    ),
    Family(
        "vllm:external_prefix_cache_hits",
        "Tokens of prompts whose KV came from other memory or from another engine.",
        _number(lambda engine, state: engine.external_hits),
    ),
    Family(
        "vllm:prompt_tokens",
        "Prompt tokens of requests that have their first token.",
        _number(lambda engine, state: engine.prompt_tokens),
    ),
    Family(
        "vllm:prompt_tokens_cached",
        "Those of vllm:prompt_tokens that were not computed.",
        _number(lambda engine, state: engine.prompt_tokens_cached),
    ),
    Family(
        "vllm:generation_tokens",
        "Generated tokens.",
        _number(lambda engine, state: engine.generation_tokens),
    ),
    Family(
        "vllm:request_success",
        "Requests that have ended, by reason.",
        lambda engine, state: [((reason,), num) for reason, num in engine.ended_by_reason.items()],
        ("finished_reason",),
    ),
    Family("vllm:spec_decode_num_drafts", "Passes that verified draft tokens.", _of_drafts("num_drafts")),
    Family("vllm:spec_decode_num_draft_tokens", "Verified draft tokens.", _of_drafts("num_draft_tokens")),
    Family(
        "vllm:spec_decode_num_accepted_tokens",
        "Accepted draft tokens.",
        _of_drafts("num_accepted_tokens"),
    ),
    Family(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens by their place in the draft, from 0.",
        _accepted_by_place,
        ("position",),
    ),
    Family(
        "vllm:estimated_flops_per_gpu",
        "Estimated floating-point operations of each GPU.",
        _number(lambda engine, state: state.flops),
    ),
    Family(
        "vllm:estimated_read_bytes_per_gpu",
        "Estimated bytes that each GPU has read from its memory.",
        _number(lambda engine, state: state.read_bytes),
    ),
)

HISTOGRAMS = (
    HistogramFamily(
        "vllm:iteration_tokens_total",
        "Tokens of an iteration: those of the prompts that it completes, and its new ones.",
        lambda engine: engine.iteration_tokens,
        is_time=False,
    ),
    HistogramFamily(
        "vllm:request_prompt_tokens",
        "Prompt tokens of a request.",
        lambda engine: engine.request_prompt_tokens,
        is_time=False,
    ),
    HistogramFamily(
        "vllm:request_generation_tokens",
        "Generated tokens of a request.",
        lambda engine: engine.request_generation_tokens,
        is_time=False,
    ),
    HistogramFamily(
        "vllm:request_params_max_tokens",
        "Parameter max_tokens of a request.",
        lambda engine: engine.request_max_tokens,
        is_time=False,
    ),
    HistogramFamily(
        "vllm:request_params_n",
        "Parameter n of a prompt.",
        lambda engine: engine.request_n,
        is_time=False,
    ),
    HistogramFamily(
        "vllm:request_num_preemptions",
        "Preemptions of a request.",
        lambda engine: engine.request_preemptions,
        is_time=False,
    ),
    HistogramFamily(
        "vllm:time_to_first_token_seconds",
        "Time from arrival to the first token.",
        lambda engine: engine.latencies.first_token,
    ),
    HistogramFamily(
        "vllm:inter_token_latency_seconds",
        "Time between the tokens of two consecutive iterations of a request.",
        lambda engine: engine.latencies.token_gap,
    ),
    HistogramFamily(
        "vllm:request_time_per_output_token_seconds",
        "Mean time per output token of a request, without the first one.",
        lambda engine: engine.latencies.per_output_token,
    ),
    HistogramFamily(
        "vllm:e2e_request_latency_seconds",
        "Time from arrival to the end of a request.",
        lambda engine: engine.latencies.e2e,
    ),
    HistogramFamily(
        "vllm:request_queue_time_seconds",
        "Time that a request waited in the engine until it was scheduled first.",
        lambda engine: engine.latencies.queue,
    ),
    HistogramFamily(
        "vllm:request_prefill_time_seconds",
        "Time from the first scheduling of a request to its first token.",
        lambda engine: engine.latencies.prefill,
    ),
    HistogramFamily(
        "vllm:request_decode_time_seconds",
        "Time from the first to the last token of a request.",
        lambda engine: engine.latencies.decode,
    ),
    HistogramFamily(
        "vllm:request_inference_time_seconds",
        "Time from the first scheduling of a request to its last token.",
        lambda engine: engine.latencies.inference,
    ),
)
