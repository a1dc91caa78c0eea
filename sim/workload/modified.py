"""Changes the requests of any workload: tenants, models and LoRA adapters, their rate, and their lengths.

Tenants, models and adapters depend only on the seed and on the number of the request, or of its session: they
are the same for a whole conversation and do not depend on how requests are served. The popularity of adapters
follows Zipf's law.

The root key `load` scales the rate of a workload; `prompt_scale` and `output_scale` scale its lengths. The
content of a prompt is scaled with its length: the id of its first k tokens becomes the id of its first
round(k scale) tokens. Prompts with a common prefix keep it, at the same share of their length, although
shortened prompts may lose the part in which they differ. An output contained in a later turn of a
conversation has its generated length there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np

from policies.adapters.serving import Adapter
from policies.core.request import Prompt, Request, Segment
from policies.prediction import uniform
from sim.workload.base import (
    ONE_ANSWER,
    Answers,
    Arrival,
    Source,
    SourceAround,
    Workload,
    WorkloadNotes,
    adds_figures,
)
from sim.workload.chunks import Chunk, ChunkedSource, chunks_of, objects


def draw(seed: int, stream: str, request: Request) -> float:
    """Returns a uniform number in [0, 1) for the session of a request, or for the request if it has none."""
    if request.session_id is None:
        return uniform(seed, stream, request.request_id)
    return uniform(seed, f"{stream}/sessions", request.session_id)


def answers_of(workload: Workload) -> Answers:
    """Returns the settings of outputs per request of a workload."""
    answers = getattr(workload, "branching", ONE_ANSWER)
    return answers if isinstance(answers, Answers) else ONE_ANSWER


def branching_key(workload: Workload, key: str = "workload") -> str:
    """Returns the config key of the `branching` setting that gives requests several outputs."""
    inside = {"of": getattr(workload, "of", None)}
    inside |= {f"parts.{name}": part for name, part in getattr(workload, "parts", {}).items()}
    for name, one in inside.items():
        if one is not None and answers_of(one).width > 1:
            return branching_key(one, f"{key}.{name}")
    return f"{key}.branching"


class MarkedSource(SourceAround):
    """The requests of another source, each changed by `mark`."""

    def __init__(self, source: Source, mark: Callable[[Request], Request]) -> None:
        super().__init__(source)
        self._mark = mark

    def _changed(self, arrival: Arrival) -> Arrival:
        return arrival._replace(request=self._mark(arrival.request))


@dataclass(frozen=True, kw_only=True, slots=True)
class OfWorkload:
    """A workload with the requests of another one, which it delays, marks or observes."""

    of: Workload
    """Workload that creates the requests."""

    @property
    def branching(self) -> Answers:
        """Outputs requested by the requests."""
        return answers_of(self.of)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Adapters that the requests name."""
        adapters: tuple[Adapter, ...] = getattr(self.of, "adapters", ())
        return adapters

    @property
    def models(self) -> Mapping[str, float]:
        """Models that the requests name, with their shares."""
        models: Mapping[str, float] = getattr(self.of, "models", {})
        return models


@dataclass(frozen=True, kw_only=True, slots=True)
class WithCallers(OfWorkload):
    """A workload and the tenants and models of its requests.

    Shares are weights and need not sum to 1.
    """

    tenants: Mapping[str, float] = field(default_factory=dict)
    """Tenant -> share of the requests (or of the sessions); empty: as the workload assigns them."""
    models: Mapping[str, float] = field(default_factory=dict)
    """Model, as pools name it, -> share of the requests; empty: as the workload assigns them."""

    def __post_init__(self) -> None:
        for name in ("tenants", "models"):
            for key, share in getattr(self, name).items():
                if not 0 < share < inf:
                    raise ValueError(f"{name}.{key}={share}: must be a finite share > 0")
        if not self.tenants and not self.models:
            raise ValueError(
                "tenants={}, models={}: at least one tenant or model must be given, with its share"
            )
        if self.tenants and _has_own_parts(self.of):
            raise ValueError(
                "tenants: must be {} for a mix whose parts add figures, because a mix names its parts by "
                "tenant; let a part have workload=callers inside (workload.of.parts)"
            )

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic of the workload, with a tenant and a model for each request."""
        tenants, models = _Shares(seed, "tenants", self.tenants), _Shares(seed, "models", self.models)

        def mark(request: Request) -> Request:
            if self.tenants:
                request = request._replace(tenant=tenants.of(request))
            if self.models:
                request = request._replace(model=models.of(request))
            return request

        return MarkedSource(self.of.source(seed=seed, max_model_len=max_model_len), mark)


def _has_own_parts(workload: object) -> bool:
    """Returns whether a workload is or contains a mix whose parts add their own metrics."""
    if workload is None:
        return False
    parts: Mapping[str, object] = getattr(workload, "parts", {})
    own = any(adds_figures(part) for part in parts.values())
    return own or _has_own_parts(getattr(workload, "of", None))


class _Shares:
    """Draws names by their shares."""

    def __init__(self, seed: int, stream: str, shares: Mapping[str, float]) -> None:
        self._seed = seed
        self._stream = stream
        self._names = list(shares)
        total = sum(shares.values())
        self._upper = [upto / total for upto in accumulate(shares.values())][:-1]

    def of(self, request: Request) -> str:
        return self._names[bisect_right(self._upper, draw(self._seed, self._stream, request))]


MAX_ADAPTERS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class WithAdapters(OfWorkload):
    """A workload and the adapters of its requests."""

    num: int = 1000
    """Number of adapters: adapter-0 (the most popular), adapter-1, ..."""
    zipf: float = 1.0
    """Exponent of the popularity; 0: all adapters are equally popular."""
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    """Ranks of the adapters, assigned in turn."""
    base_share: float = 0.0
    """Share of the requests (or sessions) without an adapter."""
    base_model: str | None = None
    """Base model of the adapters; None: the served model."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if not 1 <= self.num <= MAX_ADAPTERS:
            raise ValueError(f"num={self.num}: must be >= 1 and <= {MAX_ADAPTERS:,} adapters")
        if not 0 <= self.zipf < inf:
            raise ValueError(f"zipf={self.zipf}: must be a finite number >= 0; 0: all are equally popular")
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"ranks={list(self.ranks)}: must have at least one rank, each >= 1")
        if not 0 <= self.base_share <= 1:
            raise ValueError(f"base_share={self.base_share}: must be a share, >= 0 and <= 1")
        if isinstance(self.of, WithAdapters):
            raise ValueError("of: must be a workload without adapters of its own")

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All adapters, the most popular first."""
        num_ranks = len(self.ranks)
        return tuple(
            Adapter(name=f"adapter-{i}", rank=self.ranks[i % num_ranks], base_model=self.base_model)
            for i in range(self.num)
        )

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic of the workload, with an adapter for each request."""
        weights = np.arange(1.0, self.num + 1) ** -self.zipf
        upper: list[float] = (np.cumsum(weights) / weights.sum())[:-1].tolist()
        names = [adapter.name for adapter in self.adapters]

        def mark(request: Request) -> Request:
            drawn = draw(seed, "adapters", request)
            if drawn < self.base_share:
                return request
            drawn = (drawn - self.base_share) / (1 - self.base_share)
            return request._replace(adapter=names[bisect_right(upper, drawn)])

        return MarkedSource(self.of.source(seed=seed, max_model_len=max_model_len), mark)


def faster(source: Source, load: float) -> FasterSource:
    """Returns a source with `load` times the arrival rate of another one."""
    kind = FasterColumns if isinstance(source, ChunkedSource) else FasterSource
    return kind(source, load)


class FasterSource(SourceAround):
    """A source with the open-loop arrivals of another one at `load` times the rate.

    Deadlines and the times at which clients give up keep their distance from the arrival, and think times
    between turns stay the same.
    """

    def __init__(self, source: Source, load: float) -> None:
        super().__init__(source)
        self.last_arrival_s = None if source.last_arrival_s is None else source.last_arrival_s / load
        self._load = load

    def _changed(self, arrival: Arrival) -> Arrival:
        request, at_s = arrival.request, arrival.time_s
        arrival_s = request.arrival_s / self._load
        due_s, gives_up_s = request.deadline_s, arrival.gives_up_s
        return arrival._replace(
            request=request._replace(
                arrival_s=arrival_s,
                deadline_s=None if due_s is None else due_s - request.arrival_s + arrival_s,
            ),
            time_s=None if at_s is None else at_s / self._load,
            gives_up_s=None if gives_up_s is None else gives_up_s - arrival.at_s * (1 - 1 / self._load),
        )

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return self._source.follow_ups(request, now, num_output_tokens)


class FasterColumns(FasterSource):
    """A `FasterSource` of a source with columns, which yields columns."""

    def chunks(self) -> Iterator[Chunk]:
        """Yields the same requests as columns."""
        for chunk in chunks_of(self._source):
            if chunk.made is not None:
                made = [self._changed(arrival) for arrival in chunk.made]
                yield replace(chunk, made=objects(made), at_s=np.array([arrival.at_s for arrival in made]))
                continue
            at_s, due_s = chunk.at_s / self._load, chunk.due_s()
            yield replace(chunk, at_s=at_s, deadline_s=None if due_s is None else due_s - chunk.at_s + at_s)


UNLIMITED = 1 << 60
"""Context limit of the other source, because only scaled lengths show which requests fit."""
CUT = "conversations with a first turn longer than the context"


class _InFlight(NamedTuple):
    """A sent request that has not ended."""

    original: Request
    num_original: int
    """Output tokens before scaling."""
    num_output_tokens: int
    """Output tokens after scaling."""


class LongerSource(SourceAround):
    """The traffic of a workload with prompts and outputs (and limits on them) scaled by the given factors.

    A request that then exceeds the context is clipped, the prompt first, as in `clip_to_context`; a
    conversation ends instead. Raises ValueError for traffic that cannot be generated, like the workload.
    """

    def __init__(
        self, workload: Workload, *, seed: int, max_model_len: int, prompt_scale: float, output_scale: float
    ) -> None:
        super().__init__(workload.source(seed=seed, max_model_len=UNLIMITED))
        self._notes = self._source.notes
        self._max_model_len = max_model_len
        self._prompt_scale = prompt_scale
        self._output_scale = output_scale
        self._num_created = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._answers: dict[int, int] = {}  # content id of an output that a later prompt contains -> tokens

    @property
    def notes(self) -> WorkloadNotes:
        """Notes of the workload, plus notes on changes due to scaled lengths."""
        return self._notes

    def arrivals(self) -> Iterator[Arrival]:
        for arrival in self._source.arrivals():
            scaled = self._scaled(arrival)
            if scaled is None:
                self.notes.skip(CUT)
            else:
                yield scaled

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        ended = self._in_flight.pop(request.request_id)
        original = ended.original
        num_original = ended.num_original
        if num_output_tokens != ended.num_output_tokens:  # aborted or rejected
            num_original = _scaled(num_output_tokens, 1 / self._output_scale)
        if original.answer_id is not None:
            self._answers[original.answer_id] = num_output_tokens
        following = [self._scaled(a) for a in self._source.follow_ups(original, now, num_original)]
        sent = [arrival for arrival in following if arrival is not None]
        self.notes.num_conversations_cut += len(following) - len(sent)
        if not sent and original.answer_id is not None:
            for content in (original.answer_id, *(piece.content_id for piece in original.prompt.segments)):
                self._answers.pop(content, None)
        return sent

    def _scaled(self, arrival: Arrival) -> Arrival | None:
        """Returns the arrival with scaled lengths; None if a conversation has filled the context."""
        request, limit = arrival.request, self._max_model_len
        prompt = self._scaled_prompt(request.prompt)
        num_output_tokens = _scaled(arrival.num_output_tokens, self._output_scale)
        samples = tuple(_scaled(tokens, self._output_scale) for tokens in arrival.sample_tokens)
        if prompt.num_tokens + num_output_tokens > limit:
            if request.answer_id is not None:
                return None
            num_output_tokens = min(num_output_tokens, limit - 1)
            samples = tuple(min(tokens, limit - 1) for tokens in samples)
            prompt = _cut(prompt, limit - num_output_tokens)
            self.notes.num_clipped += 1
        max_tokens = request.max_tokens
        scaled = request._replace(
            request_id=self._num_created,
            prompt=prompt,
            max_tokens=None if max_tokens is None else _scaled(max_tokens, self._output_scale),
        )
        self._num_created += 1
        self._in_flight[scaled.request_id] = _InFlight(request, arrival.num_output_tokens, num_output_tokens)
        return arrival._replace(request=scaled, num_output_tokens=num_output_tokens, sample_tokens=samples)

    def _scaled_prompt(self, prompt: Prompt) -> Prompt:
        """Scales the segments of a prompt; the end of each depends only on what precedes it."""
        pieces: list[Segment] = []
        # Tokens so far: the client's before scaling, those of earlier outputs, and both after scaling.
        num_own = num_quoted = end = 0
        num_left, num_pinned = prompt.num_tokens, 0
        for content, num_tokens in (*prompt.segments, (None, prompt.num_tokens)):
            num_here = min(num_tokens, num_left)
            before, num_left = prompt.num_tokens - num_left, num_left - num_here
            if content in self._answers:
                num_quoted += self._answers[content]
            else:
                if before < prompt.num_pinned:
                    pinned = min(num_here, prompt.num_pinned - before)
                    num_pinned = round((num_own + pinned) * self._prompt_scale) + num_quoted
                num_own += num_here
            start, end = end, round(num_own * self._prompt_scale) + num_quoted
            if content is not None and end > start:
                pieces.append(Segment(content, end - start))
        return Prompt(max(end, 1), tuple(pieces), min(num_pinned, max(end, 1)))


def _scaled(num_tokens: int, scale: float) -> int:
    """Scales a number of tokens; a positive number stays at least 1."""
    return max(1, round(num_tokens * scale)) if num_tokens else 0


def _cut(prompt: Prompt, num_tokens: int) -> Prompt:
    """Returns a prompt with the first num_tokens tokens."""
    pieces, num_left = [], num_tokens
    for content, length in prompt.segments:
        if num_left:
            pieces.append(Segment(content, min(length, num_left)))
            num_left -= pieces[-1].num_tokens
    return Prompt(num_tokens, tuple(pieces), min(prompt.num_pinned, num_tokens))
