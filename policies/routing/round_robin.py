"""Round robin: one replica after the other, whatever their load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(kw_only=True, slots=True)
class RoundRobin:
    """Round robin; remembers only the last replica chosen."""

    _turn: int = field(default=-1, init=False)

    reads_replicas: ClassVar[bool] = False

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica after the last one chosen."""
        self._turn = (self._turn + 1) % len(replicas)
        return self._turn

    def choose_many(self, count: int, replicas: Sequence[ReplicaView]) -> NDArray[np.int64]:
        """Returns the next `count` replicas in turn."""
        turns = (self._turn + 1 + np.arange(count)) % len(replicas)
        if count:
            self._turn = int(turns[-1])
        return turns
