"""The traffic of several workloads at once, each of which is a tenant."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.core.request import Prompt, Request, Segment
from sim.workload.base import Arrival, Source, Workload, WorkloadNotes


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """The requests of all parts, in order of time; the name of a part is the tenant of its requests.

    Parts with a tenant of their own keep it behind the name of the part: chat/client-3. priorities: part ->
    priority of its requests; as the part sets it if it is not named.
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
            named = [kind for kind in ("adapters", "models") if getattr(part, kind, None)]
            if named:
                raise ValueError(
                    f"parts.{name}: must not name {named[0]}, which are those of a whole workload; let "
                    "workload=lora or workload=callers have the mix inside (workload.of)"
                )

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic of all parts; each has random numbers of its own."""
        sources = [
            part.source(seed=seed * len(self.parts) + i, max_model_len=max_model_len)
            for i, part in enumerate(self.parts.values())
        ]
        return MixSource(sources, list(self.parts), self.priorities)


class _InFlight(NamedTuple):
    """A request of a part that has not ended."""

    part: int
    original: Request


class MixSource:
    """The requests of several sources under new ids: those of part p of n are p, n + p, 2 n + p, ...

    Ids of requests are given in the order of creation. Sessions and contents of different parts are
    different.
    """

    def __init__(self, sources: list[Source], names: list[str], priorities: Mapping[str, int]) -> None:
        """Creates the traffic. The notes are the sums of those of the sources, as soon as they change."""
        totals = [source.num_requests for source in sources]
        known = [total for total in totals if total is not None]
        self.num_requests = sum(known) if len(known) == len(totals) else None
        lasts_s = [source.last_arrival_s for source in sources]
        last_s = [time_s for time_s in lasts_s if time_s is not None]
        self.last_arrival_s = max(last_s) if len(last_s) == len(lasts_s) else None
        self.patience_s: float | None = None  # the parts have their own: see `gives_up_s`
        self._sources = sources
        self._names = names
        self._priorities = priorities
        self._num_created = 0
        self._in_flight: dict[int, _InFlight] = {}

    @property
    def notes(self) -> WorkloadNotes:
        """Notes of all parts so far."""
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
