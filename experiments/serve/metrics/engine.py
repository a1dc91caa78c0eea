"""Counters and histograms of one engine since its start, as vLLM counts.

The back end calls a method for each event, none of them per token: an iteration is one call, whatever the
number of its sequences. Times are seconds of the back end's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from experiments.serve.metrics.histogram import (
    FIRST_TOKEN_S,
    ITERATION_TOKENS,
    OUTPUTS_PER_PROMPT,
    PREEMPTIONS,
    REQUEST_LATENCY_S,
    TOKEN_GAP_S,
    Histogram,
    request_tokens,
)

FINISHED_REASONS = ("stop", "length", "abort", "error")


class EngineState(NamedTuple):
    """The state of an engine at a scrape.

    num_running: requests that hold a slot and compute. num_waiting: requests that wait for capacity.
    num_deferred: requests that wait for KV or an adapter to be loaded. kv_cache_usage: share of the KV
    blocks that requests use, 0 to 1. waiting_adapters, running_adapters: LoRA adapters of waiting and of
    running requests. num_preemptions: since the start. flops, read_bytes: estimates since the start, of one
    device.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    kv_cache_usage: float = 0.0
    waiting_adapters: Sequence[str] = ()
    running_adapters: Sequence[str] = ()
    num_preemptions: int = 0
    flops: float = 0.0
    read_bytes: float = 0.0


class EndedRequest(NamedTuple):
    """A request that has ended, with times in seconds. finished_reason: one of `FINISHED_REASONS`.

    arrival_s: at the server. queued_s: at the engine. max_tokens: limit of the client, or of the model.
    """

    finished_reason: str
    prompt_tokens: int
    generation_tokens: int
    max_tokens: int
    num_preemptions: int
    arrival_s: float
    queued_s: float
    scheduled_s: float
    first_token_s: float
    last_token_s: float
    finished_s: float


@dataclass(slots=True)
class Latencies:
    """Histograms of the time that complete requests spent in their phases, s."""

    e2e: Histogram = field(default_factory=lambda: Histogram(REQUEST_LATENCY_S))
    queue: Histogram = field(default_factory=lambda: Histogram(REQUEST_LATENCY_S))
    prefill: Histogram = field(default_factory=lambda: Histogram(REQUEST_LATENCY_S))
    decode: Histogram = field(default_factory=lambda: Histogram(REQUEST_LATENCY_S))
    inference: Histogram = field(default_factory=lambda: Histogram(REQUEST_LATENCY_S))
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    token_gap: Histogram = field(default_factory=lambda: Histogram(TOKEN_GAP_S))
    per_output_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_GAP_S))


class DraftCounts:
    """Counts of speculation. accepted_by_place: passes that accepted the draft token at each place."""

    def __init__(self, num_places: int) -> None:
        self.num_drafts = self.num_draft_tokens = 0
        self.accepted_by_place = [0] * num_places

    @property
    def num_accepted_tokens(self) -> int:
        """Number of accepted draft tokens."""
        return sum(self.accepted_by_place)

    def add(self, num_drafts: int, num_draft_tokens: int, accepted_by_place: Sequence[int]) -> None:
        """Counts the passes of an iteration. num_drafts: passes with at least one draft token."""
        self.num_drafts += num_drafts
        self.num_draft_tokens += num_draft_tokens
        for place, num_accepted in enumerate(accepted_by_place):
            self.accepted_by_place[place] += num_accepted


class EngineMetrics:
    """Counters and histograms of one engine.

    index: value of the label `engine`. state: called at every scrape. max_model_len: longest request in
    tokens. cache_config: labels of `vllm:cache_config_info`. num_draft_places: draft tokens of a pass at
    most; 0: no speculation. max_adapters: LoRA adapters in a batch; None: no adapters are served.
    """

    def __init__(
        self,
        index: int,
        state: Callable[[], EngineState],
        *,
        model_name: str,
        max_model_len: int,
        cache_config: Mapping[str, str],
        num_draft_places: int = 0,
        max_adapters: int | None = None,
    ) -> None:
        self.index = index
        self.state = state
        self.model_name = model_name
        self.cache_config = cache_config
        self.max_adapters = max_adapters
        self.drafts = DraftCounts(num_draft_places) if num_draft_places else None
        self.prefix_queries = self.prefix_hits = 0
        self.external_queries = self.external_hits = 0
        self.prompt_tokens = self.prompt_tokens_cached = self.generation_tokens = 0
        self.ended_by_reason = dict.fromkeys(FINISHED_REASONS, 0)
        self.latencies = Latencies()
        self.iteration_tokens = Histogram(ITERATION_TOKENS)
        token_bounds = request_tokens(max_model_len)
        self.request_prompt_tokens = Histogram(token_bounds)
        self.request_generation_tokens = Histogram(token_bounds)
        self.request_max_tokens = Histogram(token_bounds)
        self.request_n = Histogram(OUTPUTS_PER_PROMPT)
        self.request_preemptions = Histogram(PREEMPTIONS)

    def looked_up(self, num_tokens: int, num_hits: int) -> None:
        """Counts the lookup of a prompt of num_tokens in the prefix cache, when it is scheduled first."""
        self.prefix_queries += num_tokens
        self.prefix_hits += num_hits

    def looked_up_elsewhere(self, num_tokens: int, num_hits: int) -> None:
        """Counts the lookup of the rest of that prompt in other memory or in another engine."""
        self.external_queries += num_tokens
        self.external_hits += num_hits

    def prefilled(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Counts the prompt of a request that gets its first token."""
        self.prompt_tokens += prompt_tokens
        self.prompt_tokens_cached += cached_tokens

    def iterated(self, computed_prompt_tokens: int, generation_tokens: int) -> None:
        """Counts an iteration: the computed tokens of the prompts that it completes, and its new tokens."""
        if computed_prompt_tokens or generation_tokens:
            self.generation_tokens += generation_tokens
            self.iteration_tokens.observe(computed_prompt_tokens + generation_tokens)

    def first_token(self, latency_s: float) -> None:
        """Counts the time from the arrival of a request to its first token."""
        self.latencies.first_token.observe(latency_s)

    def token_gaps(self, gap_s: float, num_requests: int) -> None:
        """Counts the gap that requests have in common between their last two iterations with tokens."""
        self.latencies.token_gap.observe(gap_s, num_requests)

    def parameters(self, n: int) -> None:
        """Counts the parameter n of a prompt."""
        self.request_n.observe(n)

    def ended(self, request: EndedRequest) -> None:
        """Counts a request that has ended; only a complete one has latencies and lengths."""
        self.ended_by_reason[request.finished_reason] += 1
        if request.finished_reason not in ("stop", "length"):
            return
        latencies, num_later = self.latencies, request.generation_tokens - 1
        decode_s = request.last_token_s - request.first_token_s
        latencies.e2e.observe(request.finished_s - request.arrival_s)
        latencies.queue.observe(request.scheduled_s - request.queued_s)
        latencies.prefill.observe(request.first_token_s - request.scheduled_s)
        latencies.decode.observe(decode_s)
        latencies.inference.observe(request.last_token_s - request.scheduled_s)
        latencies.per_output_token.observe(decode_s / num_later if num_later > 0 else 0.0)
        self.request_prompt_tokens.observe(request.prompt_tokens)
        self.request_generation_tokens.observe(request.generation_tokens)
        self.request_max_tokens.observe(request.max_tokens)
        self.request_preemptions.observe(request.num_preemptions)
