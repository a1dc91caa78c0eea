"""Any workload, its requests marked with what it does not know itself: a tenant, a model, an adapter.

What a request gets depends on the seed and on its number, or that of its session, alone: the same however it
is served, and the same for a whole conversation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from policies.adapters.registry import Adapter
from policies.core.request import Request
from policies.prediction.draws import uniform
from sim.workload.answers import ONE_ANSWER, Answers
from sim.workload.base import Arrival, Source, Workload


def draw(seed: int, stream: str, request: Request) -> float:
    """A number in [0, 1) for a request, or for its session."""
    if request.session_id is None:
        return uniform(seed, stream, request.request_id)
    return uniform(seed, f"{stream}/sessions", request.session_id)


def answers_of(workload: Workload) -> Answers:
    """How many answers its requests ask for."""
    answers = getattr(workload, "branching", ONE_ANSWER)
    return answers if isinstance(answers, Answers) else ONE_ANSWER


class MarkedSource:
    """The requests of another source, each as `mark` makes it."""

    def __init__(self, source: Source, mark: Callable[[Request], Request]) -> None:
        self.num_requests = source.num_requests
        self.last_arrival_s = source.last_arrival_s
        self.patience_s = source.patience_s
        self.notes = source.notes
        self._source = source
        self._mark = mark

    def arrivals(self) -> Iterator[Arrival]:
        for arrival in self._source.arrivals():
            yield arrival._replace(request=self._mark(arrival.request))

    def follow_up(self, request: Request, now: float, num_output_tokens: int) -> Arrival | None:
        arrival = self._source.follow_up(request, now, num_output_tokens)
        return None if arrival is None else arrival._replace(request=self._mark(arrival.request))


@dataclass(frozen=True, kw_only=True, slots=True)
class WithCallers:
    """Settings: the workload, whose requests they are, and what they ask for.

    Shares need not add up to 1: they are weights.
    """

    of: Workload
    """How much is asked for, and when."""
    tenants: Mapping[str, float] = field(default_factory=dict)
    """Name -> share of the requests, or of the sessions; none: as the workload says."""
    models: Mapping[str, float] = field(default_factory=dict)
    """The same of models, by the names of those that pools serve."""

    def __post_init__(self) -> None:
        for name in ("tenants", "models"):
            for key, share in getattr(self, name).items():
                if not 0 < share < inf:
                    raise ValueError(f"{name}.{key}={share}: must be a finite share > 0")
        if not self.tenants and not self.models:
            raise ValueError("tenants={}, models={}: must name one, with its share")

    @property
    def branching(self) -> Answers:
        """How many answers its requests ask for."""
        return answers_of(self.of)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Those that its requests name."""
        adapters: tuple[Adapter, ...] = getattr(self.of, "adapters", ())
        return adapters

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """The workload's own traffic, each request with its tenant and its model."""
        tenants, models = _Shares(seed, "tenants", self.tenants), _Shares(seed, "models", self.models)

        def mark(request: Request) -> Request:
            if self.tenants:
                request = request._replace(tenant=tenants.of(request))
            if self.models:
                request = request._replace(model=models.of(request))
            return request

        return MarkedSource(self.of.source(seed=seed, max_model_len=max_model_len), mark)


class _Shares:
    """Names drawn by their shares."""

    def __init__(self, seed: int, stream: str, shares: Mapping[str, float]) -> None:
        self._seed = seed
        self._stream = stream
        self._names = list(shares)
        total = sum(shares.values())
        self._upper = [upto / total for upto in accumulate(shares.values())][:-1]

    def of(self, request: Request) -> str:
        return self._names[bisect_right(self._upper, draw(self._seed, self._stream, request))]
