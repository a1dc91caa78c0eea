"""Assigns a tenant and a model to the requests of any workload.

They depend only on the seed and on the number of the request, or of its session: they are the same for a
whole conversation and do not depend on how requests are served.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from policies.adapters.registry import Adapter
from policies.core.request import Request
from policies.prediction.draws import uniform
from sim.workload.answers import ONE_ANSWER, Answers
from sim.workload.base import Arrival, Source, Workload, WorkloadNotes, is_open_loop
from sim.workload.own_figures import adds_figures


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
    """Returns the config key of the setting `branching` by which requests have several outputs."""
    inside = {"of": getattr(workload, "of", None)}
    inside |= {f"parts.{name}": part for name, part in getattr(workload, "parts", {}).items()}
    for name, one in inside.items():
        if one is not None and answers_of(one).width > 1:
            return branching_key(one, f"{key}.{name}")
    return f"{key}.branching"


class MarkedSource:
    """The requests of another source, each changed by `mark`."""

    def __init__(self, source: Source, mark: Callable[[Request], Request]) -> None:
        self.num_requests = source.num_requests
        self.last_arrival_s = source.last_arrival_s
        self.patience_s = source.patience_s
        self.is_open_loop = is_open_loop(source)
        self._source = source
        self._mark = mark

    @property
    def notes(self) -> WorkloadNotes:
        """Notes of the other source."""
        return self._source.notes

    def arrivals(self) -> Iterator[Arrival]:
        for arrival in self._source.arrivals():
            yield arrival._replace(request=self._mark(arrival.request))

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        following = self._source.follow_ups(request, now, num_output_tokens)
        return [arrival._replace(request=self._mark(arrival.request)) for arrival in following]


@dataclass(frozen=True, kw_only=True, slots=True)
class OfWorkload:
    """A workload whose requests are those of another one, which it delays, marks or looks at."""

    of: Workload
    """Workload that creates the requests."""

    @property
    def branching(self) -> Answers:
        """Answers that the requests ask for."""
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
    """Returns whether a workload is, or has inside, a mix whose parts add figures of their own."""
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
