"""The log of passes: how many draft tokens every pass of every sequence accepted, one byte per pass."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from policies.core.sequence import Sequence
from policies.speculation.engine.drafts import DraftPlan, Ints
from sim.records.mapped_buffers import MappedBuffers
from sim.records.table import Table

MAX_PLACES: Final = 255
"""Places of a draft at most, as acceptances are bytes."""
COLUMNS: Final = {"request_id": "i8", "replica": "i4", "iteration": "i4", "kept_tokens": "u1"}
"""Columns of the table of bursts and their dtypes."""
_PLAN: Final = np.dtype([(name, "i8") for name in ("first_id", "first_depth", "num_seqs", "num_iterations")])
_PACK: Final = Struct("=4q").pack


class BurstLog:
    """The passes of one replica. The sequences of a plan are written when they change."""

    def __init__(self, first_iteration: int) -> None:
        self._accepted = bytearray()  # [iterations, sequences] of each plan
        self._plans = bytearray()
        self._ids = bytearray()  # request ids
        self._depths = bytearray()  # [sequences], if they differ from those of the plan before
        self._buffers = MappedBuffers(self._accepted, self._plans, self._ids, self._depths)
        self._surplus = array("q")  # pass, accepted draft tokens behind the end of the answer
        self.first_iteration = first_iteration
        """Number of iterations of the replica before the first that is logged here."""
        self._seqs: SequenceOf[Sequence] = ()
        self._depth: Ints | None = None
        self._first_id = self._num_ids = self._first_depth = self._num_depths = self._num_passes = 0

    def add(self, drafts: DraftPlan, depth: Ints, accepted: Ints, surplus: Ints | None) -> None:
        """Logs the iterations of a plan.

        depth [sequences]: draft tokens that a pass can accept; 0 for one that does not count. accepted
        [iterations, sequences]. surplus [sequences]: those of the last iteration that do not stay, as the
        answer ends before; None: all stay.
        """
        num_iterations, num_seqs = accepted.shape
        if drafts.seqs is not self._seqs:
            self._seqs = drafts.seqs
            self._first_id = self._num_ids
            self._num_ids += num_seqs
            self._ids += drafts.ids.tobytes()
        if depth is not self._depth:
            self._depth = depth
            self._first_depth = self._num_depths
            self._num_depths += num_seqs
            self._depths += depth.astype(np.uint8).tobytes()
        self._plans += _PACK(self._first_id, self._first_depth, num_seqs, num_iterations)
        self._accepted += accepted.astype(np.uint8).tobytes()
        self._num_passes += num_iterations * num_seqs
        if surplus is not None:
            for index in np.flatnonzero(surplus).tolist():
                self._surplus.extend((self._num_passes - num_seqs + index, int(surplus[index])))
        if len(self._accepted) >= self._buffers.limit:
            self._buffers.move()

    def take(self, replica: int) -> tuple[Ints, Ints, Table]:
        """Returns the passes with a draft token at each place, those that accepted it, and the bursts.

        Bursts are one row per pass that kept draft tokens, in the order of time. The log is dropped.
        """
        kept = self._buffers.take(self._accepted, np.uint8)
        plans = self._buffers.take(self._plans, _PLAN)
        ids = self._buffers.take(self._ids, np.int64)
        first, at, plan = np.unique(
            plans["first_depth"][plans["num_seqs"] > 0], return_index=True, return_inverse=True
        )
        decoding = plans[plans["num_seqs"] > 0]
        repeats = np.zeros(len(first), np.int64)
        np.add.at(repeats, plan, decoding["num_iterations"])
        num_by_depth = np.zeros(MAX_PLACES + 1, np.int64)
        repeats = np.repeat(repeats, decoding["num_seqs"][at])
        np.add.at(num_by_depth, self._buffers.take(self._depths, np.uint8), repeats)
        num_by_accepted = np.bincount(kept, minlength=MAX_PLACES + 1)
        surplus = np.frombuffer(self._surplus, np.int64).reshape(-1, 2)
        if len(surplus):
            kept = kept.copy()
            kept[surplus[:, 0]] -= surplus[:, 1].astype(np.uint8)
        bursts = _table(replica, *_bursts(plans, ids, kept, self.first_iteration))
        return _at_least(num_by_depth), _at_least(num_by_accepted), bursts


def _bursts(
    plans: NDArray[np.void], ids: Ints, kept: NDArray[np.uint8], first_iteration: int
) -> tuple[Ints, Ints, NDArray[np.uint8]]:
    """Returns request id, iteration and kept draft tokens of the bursts of plans, in the order of time."""
    num_iterations, num_seqs = plans["num_iterations"], plans["num_seqs"]
    first = np.cumsum(num_iterations) - num_iterations + first_iteration
    size = num_iterations * num_seqs
    begin = np.cumsum(size) - size
    at = np.flatnonzero(kept)
    plan = np.searchsorted(begin, at, side="right") - 1
    iteration, seq = np.divmod(at - begin[plan], num_seqs[plan])
    return ids[plans["first_id"][plan] + seq], first[plan] + iteration, kept[at]


def _table(replica: int, ids: Ints, iterations: Ints, kept: NDArray[np.uint8]) -> Table:
    """Returns the table of the bursts of a replica."""
    replicas = np.broadcast_to(np.int64(replica), ids.shape)
    columns: tuple[NDArray[Any], ...] = (ids, replicas, iterations, kept)
    return Table(
        {name: column.astype(dtype) for (name, dtype), column in zip(COLUMNS.items(), columns, strict=True)}
    )


def _at_least(counts: Ints) -> Ints:
    """Returns how many counted numbers are >= 1, >= 2, ..."""
    sums: Ints = counts[:0:-1].cumsum()[::-1]
    return sums
