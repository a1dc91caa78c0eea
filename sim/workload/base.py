"""What a simulated run needs from its traffic: arrivals in time order, and what each ended request causes.

A `Workload` is settings; `source()` makes the traffic of one run. The true output length travels beside the
request, never inside it: policies must not see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from policies.core.request import Request


class Arrival(NamedTuple):
    """One request and the truth about it."""

    request: Request  # what an engine may see
    num_output_tokens: (
        int  # known only to the simulator's oracle; of the longest answer, if there are several
    )
    sample_tokens: tuple[int, ...] = ()  # of each of several answers
    time_s: float | None = None  # when it reaches the service; None: at request.arrival_s

    @property
    def at_s(self) -> float:
        """When it reaches the service."""
        return self.request.arrival_s if self.time_s is None else self.time_s


@dataclass(slots=True)
class WorkloadNotes:
    """What a source left out or changed, for the run's summary. Counts grow while the source is read."""

    num_clipped: int = 0  # requests shortened to the model's context
    num_conversations_cut: int = 0  # conversations that ended early because the context was full
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> rows or conversations left out

    def skip(self, reason: str, count: int = 1) -> None:
        """Count something left out. Nothing is noted for a count of 0."""
        if count:
            self.skipped[reason] = self.skipped.get(reason, 0) + count


class Source(Protocol):
    """One run's traffic; made anew for each run."""

    num_requests: int | None  # expected total, if known
    last_arrival_s: float | None  # when the last request arrives, if that is known beforehand
    patience_s: float | None  # a client aborts its request this long after its arrival; None: never
    notes: WorkloadNotes

    def arrivals(self) -> Iterator[Arrival]:
        """Open-loop arrivals, sorted by `at_s`, built while they are read."""
        ...

    def follow_up(self, request: Request, now: float, num_output_tokens: int) -> Arrival | None:
        """What the same user sends because `request` ended (finished, rejected, aborted) at `now`.

        num_output_tokens: what was really generated. The new arrival_s is at least `now`. None: nothing.
        """
        ...


class Workload(Protocol):
    """Settings, a frozen dataclass built from configs/workload/*.yaml."""

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """The traffic of one run; the same seed gives the same traffic.

        No request is longer than max_model_len tokens, prompt and output together. Raises ValueError for
        traffic that cannot be made or read.
        """
        ...
