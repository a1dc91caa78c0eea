"""Any workload, its requests answered by LoRA adapters whose popularity follows Zipf's law.

The k-th most popular of n adapters gets a share k^-zipf / (1^-zipf + ... + n^-zipf) of the requests; 0 makes
all alike. A conversation stays with its adapter. Which one it is depends on the seed and the number of the
request, or of the session, alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np

from policies.adapters.registry import Adapter
from policies.prediction.draws import uniform
from policies.request import Request
from sim.workload.answers import ONE_ANSWER, Answers
from sim.workload.base import Arrival, Source, Workload

MAX_ADAPTERS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class WithAdapters:
    """Settings: the workload, and its adapters."""

    of: Workload
    """Who asks for what, and when."""
    num: int = 1000
    """Adapters: adapter-0, the most popular one, adapter-1, ..."""
    zipf: float = 1.0
    """Exponent of their popularity; 0: all alike."""
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    """Their ranks, in turns."""
    base_share: float = 0.0
    """Share of requests, or of sessions, that use the model as it is."""
    base_model: str | None = None
    """The model that they were trained on; None: the one that is served."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if not 1 <= self.num <= MAX_ADAPTERS:
            raise ValueError(f"num={self.num}: must be >= 1 and <= {MAX_ADAPTERS:,} adapters")
        if not 0 <= self.zipf < inf:
            raise ValueError(f"zipf={self.zipf}: must be a finite number >= 0; 0 makes all adapters alike")
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"ranks={list(self.ranks)}: must be one rank or more, each >= 1")
        if not 0 <= self.base_share <= 1:
            raise ValueError(f"base_share={self.base_share}: must be a share, >= 0 and <= 1")
        if isinstance(self.of, WithAdapters):
            raise ValueError("of: must be a workload whose requests have no adapters yet")

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All of them, the most popular first."""
        num_ranks = len(self.ranks)
        return tuple(
            Adapter(name=f"adapter-{i}", rank=self.ranks[i % num_ranks], base_model=self.base_model)
            for i in range(self.num)
        )

    @property
    def branching(self) -> Answers:
        """How many answers its requests ask for."""
        answers = getattr(self.of, "branching", ONE_ANSWER)
        return answers if isinstance(answers, Answers) else ONE_ANSWER

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """The workload's own traffic, each request with its adapter."""
        return AdapterSource(self, self.of.source(seed=seed, max_model_len=max_model_len), seed)


class AdapterSource:
    """The requests of another source, with adapters."""

    def __init__(self, settings: WithAdapters, source: Source, seed: int) -> None:
        self.num_requests = source.num_requests
        self.last_arrival_s = source.last_arrival_s
        self.patience_s = source.patience_s
        self.notes = source.notes
        self._source = source
        self._seed = seed
        self._base_share = settings.base_share
        weights = np.arange(1.0, settings.num + 1) ** -settings.zipf
        upper = np.cumsum(weights) / weights.sum()
        self._upper: list[float] = upper[:-1].tolist()
        self._names = [adapter.name for adapter in settings.adapters]

    def arrivals(self) -> Iterator[Arrival]:
        for arrival in self._source.arrivals():
            yield self._with_adapter(arrival)

    def follow_up(self, request: Request, now: float, num_output_tokens: int) -> Arrival | None:
        arrival = self._source.follow_up(request, now, num_output_tokens)
        return None if arrival is None else self._with_adapter(arrival)

    def _with_adapter(self, arrival: Arrival) -> Arrival:
        request = arrival.request
        stream, number = "adapters", request.request_id
        if request.session_id is not None:
            stream, number = "adapters/sessions", request.session_id
        drawn = uniform(self._seed, stream, number)
        if drawn < self._base_share:
            return arrival
        drawn = (drawn - self._base_share) / (1 - self._base_share)
        name = self._names[bisect_right(self._upper, drawn)]
        return arrival._replace(request=request._replace(adapter=name))
