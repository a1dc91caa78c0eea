"""Assigns LoRA adapters to the requests of any workload; their popularity follows Zipf's law.

The k-th most popular of n adapters gets a share k^-zipf / (1^-zipf + ... + n^-zipf) of the requests; zipf=0
makes all equally popular. All requests of a conversation use the same adapter. The adapter depends only on
the seed and the number of the request or session.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import inf

import numpy as np

from policies.adapters.registry import Adapter
from policies.core.request import Request
from sim.workload.base import Source
from sim.workload.marked import MarkedSource, OfWorkload, draw

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
