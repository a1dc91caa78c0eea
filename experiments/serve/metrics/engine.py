"""Counts of one engine since its start, as vLLM counts: what the table of metrics reads.

The back end calls a method for each event, none of them per token: an iteration is one call, whatever the
number of its sequences. Times are seconds of the back end's clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from time import time
from typing import NamedTuple

from experiments.serve.metrics.table import CACHE_CONFIG, TABLE, request_tokens
from policies.caching.pool import BlockPool
from policies.core.sequence import Sequence as RequestSequence
from policies.speculation import Proposer, num_places

FINISHED_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts values by bucket, many equal ones at once, which prometheus_client's own histogram cannot.

    A bucket includes its upper bound. bounds: ascending, without infinity.
    """

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Counts a value `count` times, at the cost of once."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """Returns the number of values that were counted, in all buckets together."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Returns each upper bound as text, the last one +Inf, with the number of values up to it."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


class EngineState(NamedTuple):
    """The state of an engine at a scrape.

    num_running: requests that hold a slot and compute. num_waiting: those that wait for a slot or KV memory.
    num_deferred: those that wait for KV or an adapter to be loaded. kv_cache_usage: share of
    the KV blocks that requests use, 0 to 1. max_adapters: LoRA adapters in a batch; None: no adapters are
    served. waiting_adapters, running_adapters: those of waiting and of running requests. num_preemptions:
    since the start. flops, read_bytes: estimates since the start, of one device.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    kv_cache_usage: float = 0.0
    max_adapters: int | None = None
    waiting_adapters: Sequence[str] = ()
    running_adapters: Sequence[str] = ()
    num_preemptions: int = 0
    flops: float = 0.0
    read_bytes: float = 0.0

    @property
    def num_all_waiting(self) -> int:
        """Number of requests that wait to be scheduled."""
        return self.num_waiting + self.num_deferred

    @property
    def waiting_by_reason(self) -> dict[str, int]:
        """Number of waiting requests by the reason of their wait."""
        return {"capacity": self.num_waiting, "deferred": self.num_deferred}

    @property
    def adapters(self) -> dict[tuple[str, ...], float] | None:
        """The present time by what there is of adapters; None: no adapters are served."""
        if self.max_adapters is None:
            return None
        waiting, running = ",".join(self.waiting_adapters), ",".join(self.running_adapters)
        return {(str(self.max_adapters), waiting, running): time()}


def adapters_of(sequences: Iterable[RequestSequence]) -> tuple[str, ...]:
    """Returns the names of the adapters of some sequences, each once."""
    names = (seq.request.adapter for seq in sequences)
    return tuple(dict.fromkeys(name for name in names if name is not None))


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

    @property
    def e2e_s(self) -> float:
        """Time from the arrival to the end."""
        return self.finished_s - self.arrival_s

    @property
    def queue_s(self) -> float:
        """Time in the queue of the engine."""
        return self.scheduled_s - self.queued_s

    @property
    def prefill_s(self) -> float:
        """Time from the first scheduling to the first token."""
        return self.first_token_s - self.scheduled_s

    @property
    def decode_s(self) -> float:
        """Time from the first to the last token."""
        return self.last_token_s - self.first_token_s

    @property
    def inference_s(self) -> float:
        """Time from the first scheduling to the last token."""
        return self.last_token_s - self.scheduled_s

    @property
    def per_output_token_s(self) -> float:
        """Mean time per output token without the first one; 0 if there is no other."""
        num_later = self.generation_tokens - 1
        return self.decode_s / num_later if num_later > 0 else 0.0


class DraftCounts:
    """Counts of speculation. accepted_by_place: passes that accepted the draft token at each place."""

    def __init__(self, num_places: int) -> None:
        self.num_drafts = self.num_draft_tokens = 0
        self.accepted_by_place = [0] * num_places

    @property
    def num_accepted_tokens(self) -> int:
        """Number of accepted draft tokens."""
        return sum(self.accepted_by_place)

    @property
    def num_accepted_by_position(self) -> dict[str, int]:
        """Number of accepted draft tokens by place, from 0."""
        return {str(place): num for place, num in enumerate(self.accepted_by_place)}

    def add(self, num_drafts: int, num_draft_tokens: int, accepted_by_place: Sequence[int]) -> None:
        """Counts the passes of an iteration. num_drafts: passes with at least one draft token."""
        self.num_drafts += num_drafts
        self.num_draft_tokens += num_draft_tokens
        for place, num_accepted in enumerate(accepted_by_place):
            self.accepted_by_place[place] += num_accepted


def cache_config_of(pool: BlockPool, cache_dtype: str, memory_share: float) -> dict[str, str]:
    """Returns the settings of a KV cache by the labels `CACHE_CONFIG`."""
    values = (pool.block_size, pool.num_blocks, pool.finds_kv, cache_dtype, memory_share)
    return dict(zip(CACHE_CONFIG, map(str, values), strict=True))


class EngineMetrics:
    """Counters and histograms of one engine.

    index: value of the label `engine`. state: called at every scrape. max_model_len: longest request in
    tokens. cache_config: settings of its KV cache by the labels `CACHE_CONFIG`, as far as they are known.
    proposer: of its drafts; None: no speculation.
    """

    def __init__(
        self,
        index: int,
        state: Callable[[], EngineState],
        *,
        model_name: str,
        max_model_len: int,
        cache_config: Mapping[str, str],
        proposer: Proposer | None = None,
    ) -> None:
        self.index = index
        self.state = state
        self.model_name = model_name
        self.cache_configs = {tuple(cache_config.get(name, "") for name in CACHE_CONFIG): 1}
        self.drafts = None if proposer is None else DraftCounts(num_places(proposer))
        self.prefix_queries = self.prefix_hits = 0
        self.external_queries = self.external_hits = 0
        self.prompt_tokens = self.prompt_tokens_cached = self.generation_tokens = 0
        self.ended_by_reason = dict.fromkeys(FINISHED_REASONS, 0)
        lengths = request_tokens(max_model_len)
        histograms = [row for row in TABLE if row.kind == "histogram"]
        self.histograms = {row.source: Histogram(row.bounds or lengths) for row in histograms}
        """The histograms, by the source of their values in the table of metrics."""
        self._of_requests = [row for row in histograms if row.source.startswith("request.")]

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
            self.histograms["event.iterated"].observe(computed_prompt_tokens + generation_tokens)

    def first_token(self, latency_s: float) -> None:
        """Counts the time from the arrival of a request to its first token."""
        self.histograms["event.first_token"].observe(latency_s)

    def token_gaps(self, gap_s: float, num_requests: int) -> None:
        """Counts the gap that requests have in common between their last two iterations with tokens."""
        self.histograms["event.token_gaps"].observe(gap_s, num_requests)

    def parameters(self, n: int) -> None:
        """Counts the parameter n of a prompt."""
        self.histograms["event.parameters"].observe(n)

    def ended(self, request: EndedRequest) -> None:
        """Counts a request that has ended; only a complete one has latencies and lengths."""
        self.ended_by_reason[request.finished_reason] += 1
        if request.finished_reason in ("stop", "length"):
            for row in self._of_requests:
                self.histograms[row.source].observe(row.value(request=request))
