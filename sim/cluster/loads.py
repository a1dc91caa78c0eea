"""Load counts of all replicas of a fleet in one array each, for policies that compare all replicas."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.engine.attachment import Attachment
from sim.engine.replica import Replica

FEW = 16
"""Number of replicas up to which reading the count of each costs no more than updating an array."""


class Loads:
    """The counts of all replicas of a fleet, by index. columns: the counts that policies read, by name."""

    def __init__(self) -> None:
        self.columns: dict[str, NDArray[np.int64]] = {}
        self._replicas: list[Replica] = []

    def add(self, replica: Replica) -> None:
        """Adds a new replica of the fleet, which has the next index."""
        self._replicas.append(replica)
        for name, column in self.columns.items():
            self.columns[name] = np.append(column, getattr(replica, name))
        if self.columns:
            replica.attach(LoadWatch(replica, self))

    def listed(self, replicas: list[Replica]) -> list[Replica]:
        """Returns a list of replicas, ordered by index, from which policies can read counts as arrays."""
        return replicas if len(replicas) <= FEW else CountedReplicas(replicas, self)

    def column(self, name: str) -> NDArray[np.int64]:
        """Returns one count of all replicas, by index, with shape [N]."""
        if not self.columns:
            for replica in self._replicas:
                replica.attach(LoadWatch(replica, self))
        if name not in self.columns:
            self.columns[name] = np.array([getattr(replica, name) for replica in self._replicas], np.int64)
        return self.columns[name]


class CountedReplicas(list[Replica]):
    """A list of replicas with their counts: a `policies.routing.least_outstanding.Counted`."""

    def __init__(self, replicas: SequenceOf[Replica], loads: Loads) -> None:
        super().__init__(replicas)
        self._loads = loads
        self._indices = np.array([replica.index for replica in replicas], np.int64)
        are_first = not replicas or replicas[-1].index == len(replicas) - 1
        self._num_first = len(replicas) if are_first else None

    def counts(self, name: str) -> NDArray[np.int64]:
        """Returns one count of the replicas of the list, read-only, with shape [N]."""
        column = self._loads.columns.get(name)
        if column is None:
            column = self._loads.column(name)
        counts = column[self._indices] if self._num_first is None else column[: self._num_first]
        counts.flags.writeable = False  # a view of the array of the fleet
        return counts


class LoadWatch(Attachment):
    """Updates the counts of a replica in the arrays whenever they change."""

    def __init__(self, replica: Replica, loads: Loads) -> None:
        self._replica = replica
        self._index = replica.index
        self._loads = loads

    def sent(self, request: Request) -> None:
        self._update()

    def left(self, seq: Sequence) -> None:
        self._update()

    def crashed(self, now: float) -> None:
        self._update()

    def _update(self) -> None:
        for name, column in self._loads.columns.items():
            column[self._index] = getattr(self._replica, name)
