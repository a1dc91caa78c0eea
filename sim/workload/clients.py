"""Clients of requests: their view of an output, and limits per minute for which they hold requests back.

    arrival    first token   ...   first visible token   ...   last token
       |----------- TTFT ----|          |                          |
       |---- time to publish, streaming, after output moderation --|
       |---- time to publish of a complete answer (streams: false) ---------- + moderation

The requests come from another workload and are not changed; only metrics are added. A provider limits
requests and tokens per minute; clients hold requests back to stay within these limits. Each limit is a bucket
of a minute's amount that fills continuously. A client that gets 429 and waits for `retry-after` sends its
request at the same time as a client that holds it back by itself; limits at which requests are refused
instead are admission policies (`admission=token_bucket`). A request counts with the tokens of its prompt plus
its max_tokens, or plus the true output if it sets none, as providers settle afterwards.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from policies.prediction import uniform
from sim.metrics.client_view import ClientsFigure, ClientView, PublishLatencies
from sim.metrics.distributions import Kept
from sim.records.table import AnyTable, column
from sim.workload.base import Arrival, Source, SourceAround, WorkloadNotes
from sim.workload.distributions import Distribution, Fixed, require_not_negative, require_positive
from sim.workload.modified import OfWorkload

NORMAL = NormalDist()
NOTHING_HIDDEN = Fixed(value=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WithClients(OfWorkload):
    """A workload and the clients of its requests."""

    hidden_share: Distribution = NOTHING_HIDDEN
    """Share of output tokens before the first visible one, such as reasoning tokens; at least one token is
    visible.
    """
    streams: bool = True
    """Whether clients get tokens as they are generated; False: the first token arrives with the last one."""
    moderation_s: float = 0.0
    """Time of output moderation per published piece: a token, or the complete answer."""
    reading_tokens_per_s: float | None = None
    """Reading speed of users, 6 to 8 tokens/s; null: not compared."""
    publish_slo_ms: float | None = None
    """Maximum time to publish of a good request; null: no limit."""

    def __post_init__(self) -> None:
        require_not_negative(self, "moderation_s")
        require_positive(self, "reading_tokens_per_s", "publish_slo_ms")
        for name, share in self.hidden_share.magnitudes().items():
            if not 0 <= share <= 1:
                raise ValueError(f"hidden_share.{name}={share:g}: must be a share, >= 0 and <= 1")

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic of the workload."""
        return self.of.source(seed=seed, max_model_len=max_model_len)

    def hidden_tokens(self, requests: AnyTable, seed: int, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draws the hidden tokens of each request, less than its output tokens.

        They depend on the request id, or on the session and the number of the request in it, because ids of
        later requests depend on the engine. number: these numbers, see `SessionNumbers`.
        """
        sessions = column(requests, "session_id").tolist()
        names = (f"hidden/{one}" if one >= 0 else "hidden" for one in sessions)
        drawn = [uniform(seed, name, i) for name, i in zip(names, number.tolist(), strict=True)]
        scores = np.array([NORMAL.inv_cdf(p) for p in drawn])
        share = np.clip(self.hidden_share.from_normal(scores), 0.0, 1.0)
        tokens = column(requests, "output_tokens", np.int64)
        hidden: NDArray[np.int64] = np.minimum(
            np.rint(share * tokens).astype(np.int64), np.maximum(tokens - 1, 0)
        )
        return hidden

    @property
    def slo_terms(self) -> frozenset[str]:
        """Returns the additional latency of these requests: the time to publish."""
        return frozenset({"publish"})

    def new_latencies(self, *, seed: int, in_shards: bool, terms: Collection[str]) -> PublishLatencies:
        """Returns the accumulator of the time to publish of each request."""
        return PublishLatencies(partial(self._view_of, seed), in_shards=in_shards, draws=self._draws)

    def new_section(self, *, seed: int, in_shards: bool, kept: Kept) -> ClientsFigure:
        """Returns an accumulator of the sections `publish` and `clients`."""
        new_view = partial(self._view_of, seed)
        return ClientsFigure(new_view, in_shards=in_shards, draws=self._draws, kept=kept)

    @property
    def _draws(self) -> bool:
        """Returns whether the hidden tokens of a request depend on its number."""
        return not isinstance(self.hidden_share, Fixed)

    def _view_of(self, seed: int, requests: AnyTable, number: NDArray[np.int64]) -> ClientView:
        return ClientView(
            hidden_tokens=self.hidden_tokens(requests, seed, number),
            streams=self.streams,
            moderation_s=self.moderation_s,
            reading_tokens_per_s=self.reading_tokens_per_s,
            publish_slo_s=None if self.publish_slo_ms is None else self.publish_slo_ms / 1e3,
        )


MINUTE_S = 60.0
TOO_LARGE = "requests of more tokens than tokens_per_minute allows"


@dataclass(frozen=True, kw_only=True, slots=True)
class WithThrottle(OfWorkload):
    """A workload whose clients stay within a provider's limits.

    TTFT includes the time for which they wait.
    """

    requests_per_minute: float | None = None
    """Limit of each tenant on requests; null: none."""
    tokens_per_minute: float | None = None
    """Limit of each tenant on tokens of prompts and outputs; null: none."""

    def __post_init__(self) -> None:
        require_positive(self, "requests_per_minute", "tokens_per_minute")
        if self.requests_per_minute is None and self.tokens_per_minute is None:
            raise ValueError("requests_per_minute=null, tokens_per_minute=null: at least one must be set")
        if self.requests_per_minute is not None and self.requests_per_minute < 1:
            raise ValueError(f"requests_per_minute={self.requests_per_minute}: must be >= 1")

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic of the workload, delayed by the limits."""
        return ThrottledSource(
            self.of.source(seed=seed, max_model_len=max_model_len),
            (self.requests_per_minute, self.tokens_per_minute),
        )


class Bucket:
    """A limit of one tenant: `level` is the amount that can be sent at `since_s`, at most the limit."""

    def __init__(self, per_minute: float) -> None:
        self.per_minute = self.level = per_minute
        self.since_s = 0.0

    def free_s(self, cost: float, now: float) -> float:
        """Returns the earliest time, from now on, at which a request of this cost can be sent."""
        missing = cost - self.level
        return max(now, self.since_s + max(missing, 0.0) / self.per_minute * MINUTE_S)

    def take(self, cost: float, now: float) -> None:
        """Deducts the cost of a sent request."""
        filled = self.level + (now - self.since_s) / MINUTE_S * self.per_minute
        self.level, self.since_s = min(self.per_minute, filled) - cost, now


class ThrottledSource(SourceAround):
    """The requests of another source in order of the times at which the limits allow them.

    The requests of a tenant stay in order. A follow-up comes after the requests that arrive before the next
    one is sent.
    """

    def __init__(self, source: Source, per_minute: tuple[float | None, float | None]) -> None:
        """Creates the traffic. per_minute: limits on requests and tokens; None: no limit."""
        super().__init__(source)
        self.last_arrival_s = None
        self._per_minute = per_minute
        self._buckets: dict[str, tuple[Bucket | None, Bucket | None]] = {}
        self._last_s: dict[str, float] = {}
        self._num_held = 0
        self._held_s = 0.0
        self._num_too_large = 0

    @property
    def notes(self) -> WorkloadNotes:
        """Notes of the source, and how long requests were held back."""
        notes = self._source.notes
        skipped = notes.skipped | ({TOO_LARGE: self._num_too_large} if self._num_too_large else {})
        held = f"Clients held {self._num_held:,} requests back to keep the provider's limits, for "
        mean = f"{self._held_s / max(self._num_held, 1):.3g} s on average."
        remarks = [*notes.remarks, held + mean] if self._num_held else notes.remarks
        return replace(notes, skipped=skipped, remarks=remarks)

    def arrivals(self) -> Iterator[Arrival]:
        order = count()
        waiting: list[tuple[float, int, Arrival]] = []
        for arrival in self._source.arrivals():
            while waiting and waiting[0][0] <= arrival.at_s:
                yield heapq.heappop(waiting)[2]
            held = self._held(arrival)
            if held is not None:
                heapq.heappush(waiting, (held.at_s, next(order), held))
        while waiting:
            yield heapq.heappop(waiting)[2]

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        following = self._source.follow_ups(request, now, num_output_tokens)
        held = [self._held(arrival) for arrival in following]
        return [arrival for arrival in held if arrival is not None]

    def _held(self, arrival: Arrival) -> Arrival | None:
        """Returns the arrival at the time at which it is sent; None if it is larger than the limit."""
        request, at_s = arrival.request, arrival.at_s
        max_tokens = arrival.num_output_tokens if request.max_tokens is None else request.max_tokens
        costs = (1.0, float(request.prompt.num_tokens + max_tokens))
        _, tokens_per_minute = self._per_minute
        if tokens_per_minute is not None and costs[1] > tokens_per_minute:
            self._num_too_large += 1
            return None
        buckets = self._buckets.get(request.tenant)
        if buckets is None:
            one, other = (None if limit is None else Bucket(limit) for limit in self._per_minute)
            buckets = self._buckets[request.tenant] = (one, other)
        sent_s = max(at_s, self._last_s.get(request.tenant, 0.0))
        used = [(bucket, cost) for bucket, cost in zip(buckets, costs, strict=True) if bucket is not None]
        for bucket, cost in used:
            sent_s = max(sent_s, bucket.free_s(cost, sent_s))
        for bucket, cost in used:
            bucket.take(cost, sent_s)
        self._last_s[request.tenant] = sent_s
        if sent_s == at_s:
            return arrival
        self._num_held += 1
        self._held_s += sent_s - at_s
        return arrival._replace(time_s=sent_s)
