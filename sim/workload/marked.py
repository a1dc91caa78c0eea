"""Assigns a tenant, a model or a LoRA adapter to the requests of any workload.

They depend only on the seed and on the number of the request, or of its session: they are the same for a
whole conversation and do not depend on how requests are served. The popularity of adapters follows Zipf's
law.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

import numpy as np

from policies.adapters.registry import Adapter
from policies.core.request import Request
from policies.prediction.draws import uniform
from sim.workload.base import ONE_ANSWER, Answers, Arrival, Source, SourceAround, Workload, adds_figures


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


class MarkedSource(SourceAround):
    """The requests of another source, each changed by `mark`."""

    def __init__(self, source: Source, mark: Callable[[Request], Request]) -> None:
        super().__init__(source)
        self._mark = mark

    def _changed(self, arrival: Arrival) -> Arrival:
        return arrival._replace(request=self._mark(arrival.request))


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
