"""The interface of workloads: arrivals in order of time, and the requests that follow ended ones.

A `Workload` holds settings; `source()` creates the traffic of one run. The true output length is stored next
to the request, never inside it, because policies must not see it. A workload may add sections to the summary
of a run, and latencies for an SLO. A workload that adds sections has a method `new_section`. A workload whose
requests have latencies unknown to the engine, such as the latency of a task, has `new_latencies`, and names
them in `slo_terms`. All are collected from a workload and its nested workloads: `of` of a wrapping workload,
and the parts of a mix.

`Answers` are the settings of requests with several outputs: parallel samples, beam search or tree search.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from policies.core.limits import StopAfter
from policies.core.request import Branching, Request
from sim.metrics.distributions import Kept
from sim.metrics.workload import OwnLatency, SectionFigure


class Arrival(NamedTuple):
    """One request and its true output length."""

    request: Request
    """The part that an engine may see."""
    num_output_tokens: int
    """True output length, known only to the simulator; of the longest sample if there are several."""
    sample_tokens: tuple[int, ...] = ()
    """Output length of each sample, if there are several of different lengths."""
    time_s: float | None = None
    """Time at which the request reaches the service; None: request.arrival_s."""
    gives_up_s: float | None = None
    """Time at which its client aborts it, in addition to `Source.patience_s`; None: never."""

    @property
    def stop_after(self) -> StopAfter:
        """Output tokens after which the request ends; of each sample, if they differ."""
        return self.sample_tokens or self.num_output_tokens

    @property
    def at_s(self) -> float:
        """Time at which the request reaches the service."""
        return self.request.arrival_s if self.time_s is None else self.time_s


@dataclass(slots=True)
class WorkloadNotes:
    """Requests that a source omitted or changed, for the summary. Counts grow while the source is read."""

    num_clipped: int = 0  # requests shortened to the model's context
    num_conversations_cut: int = 0  # conversations that ended early because the context was full
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> omitted rows or conversations

    remarks: list[str] = field(default_factory=list)  # sentences on how the source was read

    def skip(self, reason: str, count: int = 1) -> None:
        """Adds to the count of rows or conversations omitted for a reason; a count of 0 adds no reason."""
        if count:
            self.skipped[reason] = self.skipped.get(reason, 0) + count


class Source(Protocol):
    """The traffic of one run; every run has its own.

    A source without follow-ups declares is_open_loop = True; other sources need no declaration.
    """

    num_requests: int | None  # expected total, if known
    last_arrival_s: float | None  # arrival of the last request, if it is known in advance
    patience_s: float | None  # a client aborts its request this long after its arrival; None: never

    @property
    def notes(self) -> WorkloadNotes:
        """Returns the omissions and changes so far."""
        ...

    def arrivals(self) -> Iterator[Arrival]:
        """Yields the open-loop arrivals, sorted by `at_s`; they are created while they are read."""
        ...

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        """Returns the follow-up requests sent because `request` has ended at `now`; empty: none.

        num_output_tokens: the number of generated tokens. The new arrival_s are at least `now`.
        """
        ...


class SourceAround:
    """A source with the requests of another one, each changed by `_changed`."""

    def __init__(self, source: Source) -> None:
        self.num_requests = source.num_requests
        self.last_arrival_s = source.last_arrival_s
        self.patience_s = source.patience_s
        self.is_open_loop = is_open_loop(source)
        self._source = source

    @property
    def notes(self) -> WorkloadNotes:
        """Returns the notes of the other source."""
        return self._source.notes

    def arrivals(self) -> Iterator[Arrival]:
        """Yields the changed arrivals."""
        return map(self._changed, self._source.arrivals())

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        """Returns the changed requests that follow."""
        return [*map(self._changed, self._source.follow_ups(request, now, num_output_tokens))]

    def _changed(self, arrival: Arrival) -> Arrival:
        """Returns the arrival as this source sends it."""
        return arrival


def is_open_loop(source: Source) -> bool:
    """Returns whether a source declares that it has no follow-up requests."""
    return bool(getattr(source, "is_open_loop", False))


class Workload(Protocol):
    """Settings of a workload, a frozen dataclass built from configs/workload/*.yaml."""

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic of one run; the same seed gives the same traffic.

        No request has more than max_model_len tokens, prompt and output together. Raises ValueError for
        traffic that cannot be generated or read.
        """
        ...


@runtime_checkable
class BeginsByRate(Protocol):
    """A source of sessions that begin in an open loop; their later requests follow ended ones."""

    @property
    def last_begin_s(self) -> float:
        """Returns the arrival of the first request of the last session."""
        ...


@runtime_checkable
class HasFigures(Protocol):
    """A workload that adds sections to the summary."""

    def new_section(self, *, seed: int, in_shards: bool, kept: Kept) -> SectionFigure | None:
        """Returns an accumulator of the sections; None: the workload has none in this case.

        in_shards: whether the requests of a run are divided over several accumulators. kept: its building
        blocks.
        """
        ...


@runtime_checkable
class HasLatencies(Protocol):
    """A workload whose requests have latencies that an SLO can limit."""

    @property
    def slo_terms(self) -> frozenset[str]:
        """Names of the latencies; see `sim.metrics.slo.WORKLOAD_TERMS`."""
        ...

    def new_latencies(self, *, seed: int, in_shards: bool, terms: Collection[str]) -> OwnLatency:
        """Returns the accumulator of the latencies. in_shards: as for `HasFigures.new_section`.

        terms: the required latencies.
        """
        ...


def own_sections(workload: object, *, seed: int, in_shards: bool, kept: Kept) -> list[SectionFigure]:
    """Returns accumulators of the sections added by a workload and its nested workloads, innermost first."""
    if workload is None:
        return []
    found = own_sections(getattr(workload, "of", None), seed=seed, in_shards=in_shards, kept=kept)
    if isinstance(workload, HasFigures):
        section = workload.new_section(seed=seed, in_shards=in_shards, kept=kept)
        found += [] if section is None else [section]
    return found


def own_latencies(
    workload: object, *, seed: int, in_shards: bool, terms: Collection[str]
) -> list[OwnLatency]:
    """Returns accumulators of the latencies of a workload and its nested workloads, innermost first."""
    if workload is None:
        return []
    found = own_latencies(getattr(workload, "of", None), seed=seed, in_shards=in_shards, terms=terms)
    if isinstance(workload, HasLatencies) and not workload.slo_terms.isdisjoint(terms):
        found.append(workload.new_latencies(seed=seed, in_shards=in_shards, terms=terms))
    return found


def own_slo_terms(workload: object) -> frozenset[str]:
    """Returns the names of the latencies that `own_latencies` returns."""
    if workload is None:
        return frozenset()
    terms = own_slo_terms(getattr(workload, "of", None))
    return terms | workload.slo_terms if isinstance(workload, HasLatencies) else terms


def adds_figures(workload: object) -> bool:
    """Returns whether a workload, or a nested one, adds sections to the summary."""
    inside = getattr(workload, "of", None)
    return isinstance(workload, HasFigures) or (inside is not None and adds_figures(inside))


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Outputs per prompt; an engine can share the prompt's KV: see `policies.core.request.Branching`.

    Each independent sample has its own length, drawn from the distribution of outputs given the prompt's
    length. The branches of a beam or tree search all end at one drawn length.
    """

    width: int = 1
    """Samples per prompt, or branches of a search."""
    every: int | None = None
    """Tokens between reselections of branches: 1 in beam search, more in tree search; None: samples."""

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width={self.width}: must be >= 1 sample")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every={self.every}: must be >= 1 token, or null for independent samples")
        if self.every is not None and self.width == 1:
            raise ValueError(
                f"width=1, every={self.every}: width must be >= 2 for a search; every=null for one sample"
            )

    @property
    def branching(self) -> Branching | None:
        """The branching of each request; None for one output."""
        return None if self.width == 1 else Branching(self.width, self.every)


ONE_ANSWER = Answers()
"""Default: one output per request."""
