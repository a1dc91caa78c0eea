"""One in n of the requests of a workload, for a fleet of which one in n replicas is simulated.

Related requests stay together. The unit that is kept or dropped is a request without a session: of several
thousand consecutive requests, a sample with the same proportion of short and long prompts and outputs, and of
tokens a session all its requests, including those of a closed-loop user a family with routing by content: all
requests whose prompts begin with the same segment, because such a router sends complete families to a replica

A replica then gets the same number of requests and units per second as in the whole fleet. The load of a
fleet depends on the lengths of all its requests, so a random sample without such proportions would have a
different load, which differences between replicas of the same fleet would not show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from policies.core.request import Request
from sim.metrics.definitions import plain_json
from sim.metrics.thinned import ByReplica, thinned_figures
from sim.workload.arrivals import ClosedLoop
from sim.workload.base import Arrival, Source, SourceAround, Workload
from sim.workload.chunks import NO_SESSION, Chunk, ChunkedSource, arrivals_of, chunks_of, objects
from sim.workload.distributions import IntArray, stream
from sim.workload.modified import OfWorkload
from sim.workload.synthetic import Synthetic

STREAM = "thin"
KEPT_PER_GROUP = 16
"""Number of sessions or families kept per group with consecutive numbers."""
CANDIDATES = 64
"""Number of samples of a chunk, of which the best is used."""
UNITS = 1 << 63
"""Number of distinguished families."""
STRATA = 4
"""Classes of prompts in a sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinnedWorkload(OfWorkload):
    """A workload of which one in `keeps_one_in` units is simulated."""

    keeps_one_in: int
    by_family: bool = False
    """Whether requests with the same first segment stay together."""
    scattered_by: str | None = None
    """Name of a router that does not keep the turns of a session together, with caches that keep the KV of
    prompts: with fewer replicas, a turn finds the previous turn's KV more often. None: there is no such
    problem.
    """

    def __post_init__(self) -> None:
        if isinstance(_closed_loop(self.of), ClosedLoop) and not isinstance(self.of, Synthetic):
            raise ValueError(
                f"sim.thin={self.keeps_one_in}: a closed loop inside of another workload cannot be thinned; "
                "choose workload=closed_loop itself, or sim.thin=1"
            )

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the kept part of the traffic. Raises ValueError if users cannot be divided."""
        if isinstance(self.of, Synthetic) and isinstance(self.of.arrivals, ClosedLoop):
            return _fewer_users(self.of, self.keeps_one_in).source(seed=seed, max_model_len=max_model_len)
        source = self.of.source(seed=seed, max_model_len=max_model_len)
        thinned = ThinnedSource(source, self.keeps_one_in, seed=seed, by_family=self.by_family)
        if self.scattered_by is not None and thinned.has_turns:
            raise ValueError(
                f"sim.thin={self.keeps_one_in}, routing={self.scattered_by}: with fewer replicas, a turn of "
                "a session finds the KV of the turn before it more often; choose routing=session_affinity or "
                "prefix_affinity, a cache without reuse such as caching=paged, or sim.thin=1"
            )
        return thinned

    def of_the_whole(
        self, summary: Mapping[str, Any], by_replica: ByReplica, *, num_replicas: int, has_sessions: bool
    ) -> dict[str, Any]:
        """Returns the section `thinned` of the summary: the kept unit, and the fleet's metrics."""
        unit = "family" if self.by_family else "session" if has_sessions else "request"
        figures = thinned_figures(
            summary, by_replica, num_replicas=num_replicas, keeps_one_in=self.keeps_one_in
        )
        plain: dict[str, Any] = plain_json({"unit": unit, **figures})
        return plain


class ThinnedSource(SourceAround):
    """One in `keeps_one_in` units of another source, under new ids in the order of creation."""

    def __init__(self, source: Source, keeps_one_in: int, *, seed: int, by_family: bool) -> None:
        super().__init__(source)
        total = source.num_requests
        self.num_requests = None if total is None else max(round(total / keeps_one_in), 1)
        chunks = chunks_of(source)
        first = next(chunks, None)
        self._once = (
            None if isinstance(source, ChunkedSource) else chain(() if first is None else (first,), chunks)
        )
        self.has_turns = first is not None and _shows_turns(first)
        """Whether requests of a session share their prompts, judged by the first request."""
        self._is_taken = False
        self._keeps_one_in = keeps_one_in
        self._seed = seed
        self._by_family = by_family
        self._kept_places = lru_cache(maxsize=4096)(self._draw_places)
        self._num_created = 0
        self._owed_2 = np.zeros(2)  # prompt and output tokens missing in the kept requests
        self._in_flight: dict[int, Request] = {}  # new id -> request as the other source knows it

    def chunks(self) -> Iterator[Chunk]:
        """Yields the kept requests as columns.

        Raises RuntimeError at the second call if the other source has no columns, because it creates its
        requests only once.
        """
        if self._once is not None and self._is_taken:
            raise RuntimeError(
                "the requests of this source are made once, as it has no columns, and have been taken; "
                "create the source again"
            )
        self._is_taken = True
        self._num_created, self._owed_2 = 0, np.zeros(2)
        whole = chunks_of(self._source) if self._once is None else self._once
        for number, chunk in enumerate(whole):
            kept = chunk.where(np.sort(self._kept_rows(number, chunk)))
            if kept.made is not None:
                kept = replace(kept, made=objects([*map(self._changed, kept.made.tolist())]))
                first_id = self._num_created - len(kept)
            else:  # sources with columns of numbers have no follow-ups
                first_id = self._num_created
                self._num_created += len(kept)
            yield replace(kept, request_id=np.arange(first_id, first_id + len(kept)))

    def arrivals(self) -> Iterator[Arrival]:
        return arrivals_of(self.chunks())

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        original = self._in_flight.pop(request.request_id, request)
        return super().follow_ups(original, now, num_output_tokens)

    def _kept_rows(self, number: int, chunk: Chunk) -> IntArray:
        """Returns the kept rows of a chunk: the rows of kept units, and a sample of the others."""
        unit = self._units(chunk)
        alone = np.flatnonzero(unit == NO_SESSION)
        tokens_2N = np.stack([chunk.prompt_tokens[alone], chunk.output_tokens[alone]])
        sample = alone[self._sample(number, tokens_2N)]
        if len(alone) == len(unit):
            return sample
        group, place = np.divmod(unit, self._keeps_one_in * KEPT_PER_GROUP)
        is_kept = np.zeros(len(unit), np.bool_)
        for one in np.unique(group[unit != NO_SESSION]).tolist():
            is_kept |= (group == one) & np.isin(place, self._kept_places(one))
        is_kept[alone] = False
        return np.concatenate([sample, np.flatnonzero(is_kept)])

    def _units(self, chunk: Chunk) -> IntArray:
        """Returns the number of each request's family or session, [N]; NO_SESSION: it has none."""
        if not self._by_family:
            return np.full(len(chunk), NO_SESSION) if chunk.session_id is None else chunk.session_id
        requests = (arrival.request for arrival in chunk.arrivals())
        units = (
            one.prompt.segments[0].content_id if one.prompt.segments else one.session_id for one in requests
        )
        # Hashes of a trace may be negative, or have more bits.
        return np.array([NO_SESSION if unit is None else unit % UNITS for unit in units], np.int64)

    def _draw_places(self, group: int) -> IntArray:
        """Draws the kept positions in a group of units with consecutive numbers."""
        size = self._keeps_one_in * KEPT_PER_GROUP
        places: IntArray = stream(self._seed, f"{STREAM}/units", group).permutation(size)[:KEPT_PER_GROUP]
        return places

    def _sample(self, number: int, tokens_2N: IntArray) -> IntArray:
        """Returns the kept rows among the single requests of a chunk.

        tokens_2N: their prompt and output tokens. One is drawn of every `keeps_one_in` neighbours in an order
        in which these have similar prompts and similar outputs: `STRATA` classes of prompts, with outputs
        that rise in one class and fall in the next. Equal requests are in random order: in order of time, the
        kept requests of a Poisson process would have nearly equal gaps. Of `CANDIDATES` such samples, the one
        that brings the kept tokens closest to their share is used.
        """
        n, rng = self._keeps_one_in, stream(self._seed, STREAM, number)
        shuffled = rng.permutation(tokens_2N.shape[1])
        by_prompt = shuffled[np.argsort(tokens_2N[0, shuffled], kind="stable")]
        in_order = np.concatenate(
            [
                part[np.argsort(tokens_2N[1, part], kind="stable")][:: -1 if i % 2 else 1]
                for i, part in enumerate(np.array_split(by_prompt, STRATA))
            ]
        )
        starts = np.arange(0, len(in_order), n)
        places_CK = starts + rng.integers(n, size=(CANDIDATES, len(starts)))
        exists_CK = places_CK < len(in_order)  # the last n may be incomplete
        rows_CK = in_order[np.where(exists_CK, places_CK, 0)]
        kept_2C = (tokens_2N[:, rows_CK] * exists_CK).sum(axis=2)
        owed_2 = self._owed_2 + tokens_2N.sum(axis=1) / n
        errors_2C = np.abs(owed_2[:, None] - kept_2C) / np.maximum(owed_2[:, None], 1.0)
        best = int(errors_2C.max(axis=0).argmin())
        self._owed_2 = owed_2 - kept_2C[:, best]
        sample: IntArray = rows_CK[best, exists_CK[best]]
        return sample

    def _changed(self, arrival: Arrival) -> Arrival:
        request_id = self._num_created
        self._num_created += 1
        if not self.is_open_loop:  # the others have no follow-ups
            self._in_flight[request_id] = arrival.request
        return arrival._replace(request=arrival.request._replace(request_id=request_id))


def _shows_turns(chunk: Chunk) -> bool:
    """Returns whether the first request of a chunk belongs to a session and has contents."""
    first = next(chunk.where(slice(0, 1)).arrivals(), None)
    return first is not None and first.request.session_id is not None and bool(first.request.prompt.segments)


def _closed_loop(workload: object) -> object:
    """Returns the arrivals of the innermost workload."""
    while (inner := getattr(workload, "of", None)) is not None:
        workload = inner
    return getattr(workload, "arrivals", None)


def _fewer_users(workload: Synthetic, keeps_one_in: int) -> Workload:
    """Returns a closed loop with one in keeps_one_in users, and with as many requests per user."""
    loop = workload.arrivals
    assert isinstance(loop, ClosedLoop)
    if loop.num_users % keeps_one_in:
        raise ValueError(
            f"sim.thin={keeps_one_in}, workload.arrivals.num_users={loop.num_users}: thin must divide the "
            "number of users"
        )
    total = workload.num_requests
    return replace(
        workload,
        arrivals=replace(loop, num_users=loop.num_users // keeps_one_in),
        num_requests=None if total is None else max(round(total / keeps_one_in), 1),
    )
