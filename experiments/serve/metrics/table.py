"""The table of metrics: name, type, description, source, labels, and buckets.

Names, labels, meanings and buckets are those of vLLM 0.32. Counters get the ending _total on the wire.

A source is where the values of a metric come from:

    state.NAME    an attribute of `EngineState`, read at a scrape
    engine.NAME   an attribute of `EngineMetrics`, read at a scrape
    request.NAME  an attribute of `EndedRequest`, observed for each complete request
    event.NAME    the method of `EngineMetrics` that observes it
    server.NAME   an attribute of `ServerState`, read at a scrape; all others have values by engine
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

TOKEN_DELAY = "windtunnel:serve_token_delay_seconds"
TOKEN_WORK = "windtunnel:serve_token_work_seconds"

REQUEST_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
TOKEN_DELAY_S = (
    *(1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.07, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0),
)
ITERATION_TOKENS = (1.0, *(2.0**power for power in range(3, 15)))
OUTPUTS_PER_PROMPT = (1.0, 2.0, 5.0, 10.0, 20.0)
CACHE_CONFIG = (
    *("block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype", "gpu_memory_utilization"),
)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def request_tokens(max_model_len: int) -> tuple[float, ...]:
    """Returns 1, 2, 5, 10, 20, 50, ... up to max_model_len: bounds for token counts of requests."""
    bounds = (first * 10.0**power for power in range(len(str(max_model_len))) for first in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= max_model_len)


class Metric(NamedTuple):
    """A row of the table. labels: after those of the engine, if it has values by engine.

    The value at a source is a number; or a mapping, of the values of the labels to numbers; or a `Histogram`;
    or None, if the engine or the server does not have it. bounds: of the buckets of an engine's histogram;
    None: `request_tokens` of the longest request. is_optional: whether the description is left out, too, if
    there are no values.
    """

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    help: str
    source: str
    labels: tuple[str, ...] = ()
    bounds: Sequence[float] | None = None
    is_optional: bool = False

    def value(self, **sources: Any) -> Any:
        """Returns the value at its source. sources: by the first word of a source."""
        scope, *names = self.source.split(".")
        value = sources[scope]
        for name in names:
            value = None if value is None else getattr(value, name)
        return value


gauge, counter, histogram = partial(Metric, "gauge"), partial(Metric, "counter"), partial(Metric, "histogram")

TABLE = (
    gauge("vllm:num_requests_running", "Number of requests in the batch of the engine.", "state.num_running"),
    gauge(
        "vllm:num_requests_waiting", "Number of requests that wait to be scheduled.", "state.num_all_waiting"
    ),
    gauge(
        "vllm:num_requests_waiting_by_reason",
        "Number of waiting requests: capacity (a slot or KV memory), deferred (KV or an adapter is loaded).",
        "state.waiting_by_reason",
        ("reason",),
    ),
    gauge(
        "vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", "state.kv_cache_usage"
    ),
    gauge(
        "vllm:gpu_cache_usage_perc", "The former name of vllm:kv_cache_usage_perc.", "state.kv_cache_usage"
    ),
    counter("vllm:num_preemptions", "Number of preemptions.", "state.num_preemptions"),
    counter(
        "vllm:prefix_cache_queries",
        "Tokens of prompts that were looked up in the prefix cache.",
        "engine.prefix_queries",
    ),
    counter(
        "vllm:prefix_cache_hits",
        "Tokens of prompts that were found in the prefix cache.",
        "engine.prefix_hits",
    ),
    counter(
        "vllm:gpu_prefix_cache_queries",
        "The former name of vllm:prefix_cache_queries.",
        "engine.prefix_queries",
    ),
    counter("vllm:gpu_prefix_cache_hits", "The former name of vllm:prefix_cache_hits.", "engine.prefix_hits"),
    counter(
        "vllm:external_prefix_cache_queries",
        "Tokens of prompts that were looked up in other memory or in another engine.",
        "engine.external_queries",
    ),
    counter(
        "vllm:external_prefix_cache_hits",
        "Tokens of prompts whose KV came from other memory or from another engine.",
        "engine.external_hits",
    ),
    counter(
        "vllm:prompt_tokens", "Prompt tokens of requests that have their first token.", "engine.prompt_tokens"
    ),
    counter(
        "vllm:prompt_tokens_cached",
        "Those of vllm:prompt_tokens that were not computed.",
        "engine.prompt_tokens_cached",
    ),
    counter("vllm:generation_tokens", "Generated tokens.", "engine.generation_tokens"),
    counter(
        "vllm:request_success",
        "Requests that have ended, by reason.",
        "engine.ended_by_reason",
        ("finished_reason",),
    ),
    counter("vllm:spec_decode_num_drafts", "Passes that verified draft tokens.", "engine.drafts.num_drafts"),
    counter("vllm:spec_decode_num_draft_tokens", "Verified draft tokens.", "engine.drafts.num_draft_tokens"),
    counter(
        "vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", "engine.drafts.num_accepted_tokens"
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens by their place in the draft, from 0.",
        "engine.drafts.num_accepted_by_position",
        ("position",),
    ),
    counter(
        "vllm:estimated_flops_per_gpu", "Estimated floating-point operations of each GPU.", "state.flops"
    ),
    counter(
        "vllm:estimated_read_bytes_per_gpu",
        "Estimated bytes that each GPU has read from its memory.",
        "state.read_bytes",
    ),
    histogram(
        "vllm:iteration_tokens_total",
        "Tokens of an iteration: those of the prompts that it completes, and its new ones.",
        "event.iterated",
        bounds=ITERATION_TOKENS,
    ),
    histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", "request.prompt_tokens"),
    histogram(
        "vllm:request_generation_tokens", "Generated tokens of a request.", "request.generation_tokens"
    ),
    histogram("vllm:request_params_max_tokens", "Parameter max_tokens of a request.", "request.max_tokens"),
    histogram(
        "vllm:request_params_n", "Parameter n of a prompt.", "event.parameters", bounds=OUTPUTS_PER_PROMPT
    ),
    histogram(
        "vllm:request_num_preemptions",
        "Preemptions of a request.",
        "request.num_preemptions",
        bounds=PREEMPTIONS,
    ),
    histogram(
        "vllm:time_to_first_token_seconds",
        "Time from arrival to the first token.",
        "event.first_token",
        bounds=FIRST_TOKEN_S,
    ),
    histogram(
        "vllm:inter_token_latency_seconds",
        "Time between the tokens of two consecutive iterations of a request.",
        "event.token_gaps",
        bounds=TOKEN_GAP_S,
    ),
    histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean time per output token of a request, without the first one.",
        "request.per_output_token_s",
        bounds=TOKEN_GAP_S,
    ),
    histogram(
        "vllm:e2e_request_latency_seconds",
        "Time from arrival to the end of a request.",
        "request.e2e_s",
        bounds=REQUEST_LATENCY_S,
    ),
    histogram(
        "vllm:request_queue_time_seconds",
        "Time that a request waited in the engine until it was scheduled first.",
        "request.queue_s",
        bounds=REQUEST_LATENCY_S,
    ),
    histogram(
        "vllm:request_prefill_time_seconds",
        "Time from the first scheduling of a request to its first token.",
        "request.prefill_s",
        bounds=REQUEST_LATENCY_S,
    ),
    histogram(
        "vllm:request_decode_time_seconds",
        "Time from the first to the last token of a request.",
        "request.decode_s",
        bounds=REQUEST_LATENCY_S,
    ),
    histogram(
        "vllm:request_inference_time_seconds",
        "Time from the first scheduling of a request to its last token.",
        "request.inference_s",
        bounds=REQUEST_LATENCY_S,
    ),
    gauge(
        "vllm:cache_config_info",
        "Settings of the KV cache, as labels.",
        "engine.cache_configs",
        CACHE_CONFIG,
    ),
    gauge(
        "vllm:lora_requests_info",
        "LoRA adapters of waiting and running requests, as labels; the value is the time of the scrape.",
        "state.adapters",
        ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        is_optional=True,
    ),
    counter(
        "vllm:admission_rejections",
        "Requests that were refused, by reason.",
        "server.rejections",
        ("model_name", "reason"),
    ),
    gauge(
        "windtunnel:serve_late_seconds",
        "Wall seconds by which the last event of the simulation was late.",
        "server.clock.late_s",
        is_optional=True,
    ),
    gauge(
        "windtunnel:serve_max_late_seconds",
        "Wall seconds by which the latest event since the start was late.",
        "server.clock.max_late_s",
        is_optional=True,
    ),
    gauge(
        "windtunnel:serve_time_scale",
        "Simulated seconds per wall second.",
        "server.clock.time_scale",
        is_optional=True,
    ),
    histogram(
        TOKEN_DELAY,
        "Wall seconds from the simulated time of tokens of a stream until they are written to its "
        "connection; a client that does not read delays its own.",
        "server.token_delays",
        is_optional=True,
    ),
    histogram(
        TOKEN_WORK,
        "CPU seconds of the server from the event that has brought tokens of a stream until they are "
        "written, also for other streams: the part of the delay that is the server's own.",
        "server.token_work",
        is_optional=True,
    ),
)
"""All metrics, in the order in which they are shown."""
