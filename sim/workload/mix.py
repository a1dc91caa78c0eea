"""The combined traffic of several workloads, each of which is a tenant."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Prompt, Request, Segment
from sim.metrics.distributions import Kept
from sim.metrics.mixed import MixFigure, MixLatencies, PartFigures, PartLatencies
from sim.metrics.workload import WorkloadRecords
from sim.records.table import column
from sim.workload.base import (
    Answers,
    Arrival,
    Source,
    Workload,
    WorkloadNotes,
    is_open_loop,
    own_latencies,
    own_sections,
    own_slo_terms,
)
from sim.workload.modified import answers_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """The requests of all parts, in order of time; the name of a part is the tenant of its requests.

    Tenants within a part follow the name of the part: chat/client-3. priorities: part -> priority of its
    requests; unlisted parts keep their own. Parts may request different numbers of outputs (`branching`);
    summary sections added by a part are in `by_part`, under its name.
    """

    parts: Mapping[str, Workload]
    priorities: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts={}: must name at least one workload")
        for name in self.priorities:
            if name not in self.parts:
                raise ValueError(f"priorities.{name}: must be one of the parts {', '.join(self.parts)}")
        for name, part in self.parts.items():
            if "/" in name:
                raise ValueError(
                    f"parts.{name}: must not contain a slash, which stands before a tenant of a part"
                )
            named = [kind for kind in ("adapters", "models") if getattr(part, kind, None)]
            if named:
                raise ValueError(
                    f"parts.{name}: must not name {named[0]}, which are those of a whole workload; let "
                    "workload=lora or workload=callers have the mix inside (workload.of)"
                )

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic of all parts; each has its own random numbers."""
        sources = [
            part.source(seed=self._seed_of(i, seed), max_model_len=max_model_len)
            for i, part in enumerate(self.parts.values())
        ]
        return MixSource(sources, list(self.parts), self.priorities)

    @property
    def branching(self) -> Answers:
        """The maximum number of outputs per request over all parts, for checks of the settings."""
        answers = [answers_of(part) for part in self.parts.values()]
        every = min((one.every for one in answers if one.every is not None), default=None)
        return Answers(width=max(one.width for one in answers), every=every)

    @property
    def slo_terms(self) -> frozenset[str]:
        """Latencies that at least one part provides."""
        return frozenset().union(*(own_slo_terms(part) for part in self.parts.values()))

    def new_section(self, *, seed: int, in_shards: bool, kept: Kept) -> MixFigure | None:
        """Returns an accumulator of the section `by_part`: part -> its sections; None if there are none."""
        parts = {
            name: PartFigures(
                i, own_sections(part, seed=self._seed_of(i, seed), in_shards=in_shards, kept=kept)
            )
            for i, (name, part) in enumerate(self.parts.items())
        }
        own = {name: part for name, part in parts.items() if part.own}
        return MixFigure(own, len(self.parts), self._rows_of) if own else None

    def new_latencies(self, *, seed: int, in_shards: bool, terms: Collection[str]) -> MixLatencies:
        """Returns the accumulator of the parts' latencies.

        Requests of other parts use their TTFT or E2E instead: without hidden tokens the first token is the
        first visible one, and a request outside of tasks counts as a task.
        """
        parts = {}
        for i, (name, part) in enumerate(self.parts.items()):
            own = own_latencies(part, seed=self._seed_of(i, seed), in_shards=in_shards, terms=terms)
            parts[name] = PartLatencies(i, own)
        return MixLatencies(parts, len(self.parts), self._rows_of, sorted(self.slo_terms & set(terms)))

    def _seed_of(self, index: int, seed: int) -> int:
        """Returns the seed of a part, which has its own random numbers."""
        return seed * len(self.parts) + index

    def _rows_of(self, name: str, records: WorkloadRecords) -> NDArray[np.bool_]:
        tenants, start = column(records.requests, "tenant").tolist(), f"{name}/"
        return np.array([one == name or one.startswith(start) for one in tenants], np.bool_)


class _InFlight(NamedTuple):
    """A request of a part that has not ended."""

    part: int
    original: Request


class MixSource:
    """The requests of several sources under new ids.

    Ids of requests are given in the order of creation. Sessions and contents of different parts differ: those
    of part p of n are p, n + p, 2 n + p, ...
    """

    def __init__(self, sources: list[Source], names: list[str], priorities: Mapping[str, int]) -> None:
        """Creates the traffic. The notes are the current sums of the sources' notes."""
        totals = [source.num_requests for source in sources]
        known = [total for total in totals if total is not None]
        self.num_requests = sum(known) if len(known) == len(totals) else None
        lasts_s = [source.last_arrival_s for source in sources]
        last_s = [time_s for time_s in lasts_s if time_s is not None]
        self.last_arrival_s = max(last_s) if len(last_s) == len(lasts_s) else None
        self.patience_s: float | None = None  # the parts have their own patience: see `gives_up_s`
        self.is_open_loop = all(map(is_open_loop, sources))
        self._sources = sources
        self._names = names
        self._priorities = priorities
        self._num_created = 0
        self._in_flight: dict[int, _InFlight] = {}

    @property
    def notes(self) -> WorkloadNotes:
        """The notes of all parts so far."""
        notes = WorkloadNotes()
        for name, source in zip(self._names, self._sources, strict=True):
            notes.num_clipped += source.notes.num_clipped
            notes.num_conversations_cut += source.notes.num_conversations_cut
            for reason, count in source.notes.skipped.items():
                notes.skip(reason, count)
            notes.remarks += [f"{name}: {remark}" for remark in source.notes.remarks]
        return notes

    def arrivals(self) -> Iterator[Arrival]:
        def of_part(part: int) -> Iterator[tuple[float, int, Arrival]]:
            return ((arrival.at_s, part, arrival) for arrival in self._sources[part].arrivals())

        in_order = heapq.merge(*map(of_part, range(len(self._sources))), key=lambda row: row[:2])
        for _, part, arrival in in_order:
            yield self._renamed(part, arrival)

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        part, original = self._in_flight.pop(request.request_id)
        following = self._sources[part].follow_ups(original, now, num_output_tokens)
        return [self._renamed(part, arrival) for arrival in following]

    def _renamed(self, part: int, arrival: Arrival) -> Arrival:
        request, patience_s, name = arrival.request, self._sources[part].patience_s, self._names[part]
        tenant, priority = request.tenant, self._priorities.get(name, request.priority)
        renamed = request._replace(
            request_id=self._num_created,
            prompt=self._own_contents(part, request.prompt),
            tenant=f"{name}/{tenant}" if tenant else name,
            priority=priority,
            session_id=self._own(part, request.session_id),
            answer_id=self._own(part, request.answer_id),
        )
        gives_up_s = arrival.gives_up_s
        if patience_s is not None:
            gives_up_s = min(request.arrival_s + patience_s, gives_up_s or float("inf"))
        self._in_flight[renamed.request_id] = _InFlight(part, request)
        self._num_created += 1
        return arrival._replace(request=renamed, gives_up_s=gives_up_s)

    def _own(self, part: int, number: int | None) -> int | None:
        """Returns the id of a session or an output of a part, which no other part has."""
        return None if number is None else number * len(self._sources) + part

    def _own_contents(self, part: int, prompt: Prompt) -> Prompt:
        num_parts = len(self._sources)
        pieces = (Segment(piece.content_id * num_parts + part, piece.num_tokens) for piece in prompt.segments)
        return prompt._replace(segments=tuple(pieces))
