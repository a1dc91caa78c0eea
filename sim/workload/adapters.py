"""Any workload, its requests answered by LoRA adapters whose popularity follows Zipf's law.

The k-th most popular of n adapters gets a share k^-zipf / (1^-zipf + ... + n^-zipf) of the requests; 0 makes
all alike. A conversation stays with its adapter. Which one it is depends on the seed and the number of the
request, or of the session, alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from policies.adapters.registry import Adapter
from policies.core.request import Request
from sim.workload.answers import Answers
from sim.workload.base import Source, Workload
from sim.workload.marked import MarkedSource, answers_of, draw

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
    def models(self) -> Mapping[str, float]:
        """Those that its requests name."""
        models: Mapping[str, float] = getattr(self.of, "models", {})
        return models

    @property
    def branching(self) -> Answers:
        """How many answers its requests ask for."""
        return answers_of(self.of)

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """The workload's own traffic, each request with its adapter."""
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
