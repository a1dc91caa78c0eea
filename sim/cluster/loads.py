"""What the replicas of a fleet have outstanding, kept side by side where a policy looks at all of them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.engine.attachment import Attachment
from sim.engine.replica import Replica

FEW = 16
"""Replicas of which it costs no more to ask each for its count than to be told of every change."""


class Loads:
    """The counts of all replicas of a fleet, by index. columns: those that have been asked for, by name."""

    def __init__(self) -> None:
        self.columns: dict[str, NDArray[np.int64]] = {}
        self._replicas: list[Replica] = []

    def add(self, replica: Replica) -> None:
        """A replica joins the fleet; its index is the next."""
        self._replicas.append(replica)
        for name, column in self.columns.items():
            self.columns[name] = np.append(column, getattr(replica, name))
        if self.columns:
            replica.attach(LoadWatch(replica, self))

    def listed(self, replicas: list[Replica]) -> list[Replica]:
        """Some of these replicas, for policies: by rising index."""
        return replicas if len(replicas) <= FEW else CountedReplicas(replicas, self)

    def column(self, name: str) -> NDArray[np.int64]:
        """One count of all replicas."""
        if not self.columns:
            for replica in self._replicas:
                replica.attach(LoadWatch(replica, self))
        if name not in self.columns:
            self.columns[name] = np.array([getattr(replica, name) for replica in self._replicas], np.int64)
        return self.columns[name]


class CountedReplicas(list[Replica]):
    """A `policies.routing.loads.Counted`."""

    def __init__(self, replicas: SequenceOf[Replica], loads: Loads) -> None:
        super().__init__(replicas)
        self._loads = loads
        self._indices = np.array([replica.index for replica in replicas], np.int64)
        are_first = not replicas or replicas[-1].index == len(replicas) - 1
        self._num_first = len(replicas) if are_first else None

    def counts(self, name: str) -> NDArray[np.int64]:
        """One count of each of them."""
        column = self._loads.columns.get(name)
        if column is None:
            column = self._loads.column(name)
        counts = column[self._indices] if self._num_first is None else column[: self._num_first]
        counts.flags.writeable = False  # they are the fleet's own
        return counts


class LoadWatch(Attachment):
    """Notes what a replica has outstanding whenever that changes."""

    def __init__(self, replica: Replica, loads: Loads) -> None:
        self._replica = replica
        self._index = replica.index
        self._loads = loads

    def sent(self, request: Request) -> None:
        self._note()

    def left(self, seq: Sequence) -> None:
        self._note()

    def crashed(self, now: float) -> None:
        self._note()

    def _note(self) -> None:
        for name, column in self._loads.columns.items():
            column[self._index] = getattr(self._replica, name)
