"""The log of the draft tokens of a replica that speculates, as a part of the log of its iterations.

Its part `BurstLog` stores the number of accepted draft tokens of every pass of every sequence, one byte per
pass. The shapes of the logged iterations, which verify draft tokens, are those used by the hardware models.
`SpeculationRecord` is the part of these logs that a run keeps: acceptance by place, and the bursts of every
request.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from hwmodels.exact import Num
from hwmodels.iterations import DraftWork, IterationShape
from policies.core.plan import StepPlan
from policies.core.sequence import Sequence
from policies.speculation.engine.drafts import DraftPlan, Ints
from sim.engine.iteration_times import shape_of
from sim.records.mapped_buffers import MappedBuffers
from sim.records.table import AnyTable, Table, joined

DRAFT_WORK_COLUMNS = ("draft_tokens", "draft_pairs", "draft_seqs", "draft_steps", "drafted_tokens")
"""Columns with the fields of `DraftWork`."""
DRAFT_COLUMNS = (
    *DRAFT_WORK_COLUMNS,
    *("proposed_tokens", "draft_passes", "verified_tokens", "accepted_tokens", "kept_tokens"),
)
"""Columns of the iteration table if an engine speculates: `DRAFT_WORK_COLUMNS`, then

    proposed_tokens draft tokens made for the next passes; the proposer may find fewer than requested
    draft_passes sequences with at least one draft token, without those that had already ended verified_tokens
    their draft tokens
    accepted_tokens accepted draft tokens kept_tokens accepted draft tokens before the end of the output
"""


_PLAN_COLUMNS: Final = (
    *("draft_tokens", "draft_seqs", "draft_steps", "drafted_tokens"),
    *("proposed_tokens", "draft_passes", "verified_tokens"),
)
"""Columns with the same number in all iterations of a plan."""
_PLAN: Final = ("iterations", *_PLAN_COLUMNS, "common", "lost", "surplus")
"""Per plan: its iterations, the columns, draft tokens of each sequence (-1: they differ, and their pairs are
logged), and accepted draft tokens of sequences that had already ended, and of tokens after an end.
"""
_PACK: Final = Struct(f"={len(_PLAN)}q").pack


class DraftLog:
    """The draft tokens of the iterations of one replica. first_iteration: see `BurstLog`."""

    def __init__(self, first_iteration: int) -> None:
        self.bursts = BurstLog(first_iteration)
        """Accepted draft tokens of each pass."""
        self._drafts = bytearray()  # per plan: `_PLAN`
        self._sums = bytearray()  # per iteration: tokens that sequences got
        self._blocks = bytearray()  # per iteration of a leap: KV blocks added since the first
        self._pairs = bytearray()  # per iteration: query-key pairs of draft tokens, if they are logged
        self._buffers = MappedBuffers(self._drafts, self._sums, self._blocks, self._pairs)

    @property
    def num_bytes(self) -> int:
        """Memory of the log without its bursts, bytes."""
        return self._buffers.num_all_bytes()

    def add(
        self,
        drafts: DraftPlan,
        contexts: list[int],
        *,
        num_proposed: int | None,
        ended: Collection[Sequence],
    ) -> None:
        """Logs iterations of a plan that are about to be committed.

        contexts: tokens that all decodes attend to in each. num_proposed: draft tokens made for the next
        passes; None: the requested number. ended: sequences that had already ended.
        """
        num_iterations, num_seqs, rows = len(contexts), len(drafts.seqs), drafts.num_drafts
        accepted, depth, common = drafts.accepted, drafts.depth, drafts.common
        assert accepted is not None
        if num_iterations < len(accepted):
            accepted = accepted[:num_iterations]
        totals, surplus, num_lost, num_surplus = drafts.totals[num_iterations - 1], None, 0, 0
        if np.count_nonzero(totals > drafts.end):
            surplus = np.maximum(totals - drafts.end, 0)
        if common:
            num_judged, num_verified = num_seqs, num_seqs * common
        else:
            num_judged, num_verified = int(np.count_nonzero(rows)), int(np.add.reduce(rows))
        if ended and (places := _places_of(ended, drafts.slots)):
            assert num_iterations == 1
            num_judged -= int(np.count_nonzero(rows[places]))
            num_verified -= int(np.add.reduce(rows[places]))
            num_lost = int(np.add.reduce(accepted[0][places]))
            accepted, depth = accepted.copy(), depth.copy()
            accepted[:, places] = depth[places] = 0
            if surplus is not None:
                surplus[places] = 0
        if surplus is not None:
            num_surplus = int(np.add.reduce(surplus))
        self.bursts.add(drafts, depth, accepted, surplus if num_surplus else None)
        if common is None or drafts.padded:
            common = -1
            self._pairs += array("q", pairs_of(drafts, contexts)).tobytes()
        self._sums += drafts.sums[:num_iterations].tobytes()
        if num_iterations > 1:
            self._blocks += drafts.num_new_blocks[:num_iterations].tobytes()
        num_next, num_drafted = drafts.next_counts
        made = drafts.next_levels, num_drafted, num_drafted if num_proposed is None else num_proposed
        of_pass = num_judged, num_verified, common, num_lost, num_surplus
        self._drafts += _PACK(num_iterations, drafts.num_tokens, num_next, *made, *of_pass)
        if len(self._drafts) >= self._buffers.limit:
            self._buffers.move()

    def fill(self, columns: dict[str, NDArray[Any]]) -> None:
        """Fills the columns of drafts, and corrects the columns that count them. The log is dropped."""
        plans = self._buffers.take(self._drafts, np.int64).reshape(-1, len(_PLAN))
        plan = dict(zip(_PLAN, plans.T, strict=True))
        num = plan["iterations"]
        for name in _PLAN_COLUMNS:
            columns[name][:] = np.repeat(plan[name], num)
        columns["sampled_seqs"] += columns["draft_tokens"].astype(np.int32)
        sums, num_seqs = self._buffers.take(self._sums, np.int64), columns["decode_seqs"].astype(np.int64)
        last = np.cumsum(num) - 1
        first = last - num + 1
        accepted = sums - num_seqs
        accepted[first] -= plan["lost"]
        columns["accepted_tokens"][:] = columns["kept_tokens"][:] = accepted
        columns["kept_tokens"][last] -= plan["surplus"]
        has_chunks = columns["prefill_seqs"] > 0
        before = np.cumsum(sums) - sums
        grown = before - np.repeat(before[first], num)
        columns["kv_tokens_used"] += np.where(has_chunks, 0, grown)
        columns["decode_context_tokens"] += grown
        is_leap = np.repeat(num > 1, num)
        new_blocks = np.zeros(len(sums), np.int64)
        new_blocks[is_leap] = self._buffers.take(self._blocks, np.int64)
        columns["kv_blocks_used"] += np.where(has_chunks, 0, new_blocks).astype(np.int32)
        common = np.repeat(plan["common"], num)
        pairs = (columns["decode_context_tokens"] - num_seqs) * common
        pairs += num_seqs * (common * (common + 3) // 2)
        pairs[common < 0] = self._buffers.take(self._pairs, np.int64)
        columns["draft_pairs"][:] = pairs


def _places_of(ended: Collection[Sequence], slots: Ints) -> list[int]:
    """Returns the places of ended sequences among those of a plan, which have slots [sequences]."""
    return [place for seq in ended for place in np.flatnonzero(slots == seq.slot).tolist()]


MAX_PLACES: Final = 255
"""Maximum number of places of a draft, because acceptances are bytes."""
COLUMNS: Final = {"request_id": "i8", "replica": "i4", "iteration": "i4", "kept_tokens": "u1"}
"""Columns of the table of bursts and their dtypes."""
_BURST_PLAN: Final = np.dtype(
    [(name, "i8") for name in ("first_id", "first_depth", "num_seqs", "num_iterations")]
)
_PACK_BURST: Final = Struct("=4q").pack


class BurstLog:
    """The passes of one replica. The sequences of a plan are written when they change."""

    def __init__(self, first_iteration: int) -> None:
        self._accepted = bytearray()  # [iterations, sequences] of each plan
        self._plans = bytearray()
        self._ids = bytearray()  # request ids
        self._depths = bytearray()  # [sequences], if they differ from those of the plan before
        self._buffers = MappedBuffers(self._accepted, self._plans, self._ids, self._depths)
        self._surplus = array("q")  # pass, accepted draft tokens after the end of the output
        self.first_iteration = first_iteration
        """Number of iterations of the replica before the first one logged here."""
        self._seqs: SequenceOf[Sequence] = ()
        self._depth: Ints | None = None
        self._first_id = self._num_ids = self._first_depth = self._num_depths = self._num_passes = 0

    def add(self, drafts: DraftPlan, depth: Ints, accepted: Ints, surplus: Ints | None) -> None:
        """Logs the iterations of a plan.

        depth [sequences]: draft tokens that a pass can accept; 0 for one that does not count. accepted
        [iterations, sequences]. surplus [sequences]: accepted tokens of the last iteration that are discarded
        because the output ends before them; None: none.
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
        self._plans += _PACK_BURST(self._first_id, self._first_depth, num_seqs, num_iterations)
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
        plans = self._buffers.take(self._plans, _BURST_PLAN)
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


def pairs_of(drafts: DraftPlan, contexts: list[int]) -> list[int]:
    """Counts the query-key pairs of the draft tokens and padding rows of each iteration.

    contexts: tokens attended to by all decodes in each.
    """
    rows, common, num_seqs = drafts.num_drafts, drafts.common, len(drafts.seqs)
    if common is not None and not drafts.padded:
        own_pairs = num_seqs * (common * (common + 3) // 2)
        return [(context - num_seqs) * common + own_pairs for context in contexts]
    own_pairs = int(np.dot(rows, rows + 3)) // 2  # with the new token, and with those before it
    own_pairs += sum(drafts.padded.values())
    computed = [drafts.num_computed, *drafts.totals[: len(contexts) - 1]]
    return [int(np.dot(each, rows)) + own_pairs for each in computed]


def first_shape(plan: StepPlan, drafts: DraftPlan) -> IterationShape:
    """Returns the shape of the first iteration of a plan."""
    return with_drafts(shape_of(plan, 0), drafts, pairs_of(drafts, [plan.num_decode_context_tokens])[0])


def with_drafts(shape: IterationShape, drafts: DraftPlan, pairs: Num) -> IterationShape:
    """Adds the draft tokens of a plan to a shape. pairs: see `pairs_of`."""
    num_next, num_drafted = drafts.next_counts
    work = DraftWork(
        tokens=drafts.num_tokens, pairs=pairs, seqs=num_next, steps=drafts.next_levels, drafted=num_drafted
    )
    return shape._replace(drafts=work, sampled_seqs=shape.sampled_seqs + drafts.num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationRecord:
    """Records of the draft tokens of a run.

    acceptance: one row per pool and place, by (pool, place), over the whole run: `drafted`, the passes that
      verified a draft token at the place (with a tree: tokens at the depth), and `accepted`, the passes that
      accepted one. Passes of already ended sequences do not count. place: 1 is the first draft token.
    bursts: one row per pass that kept draft tokens: request_id, replica, iteration, kept_tokens. They arrived
    together with one more token at the end of that iteration.
    """

    acceptance: AnyTable
    bursts: AnyTable


class _LogOfReplica(Protocol):
    """The part of a replica's iteration log from which a record is made."""

    @property
    def replica(self) -> int: ...

    @property
    def drafts(self) -> DraftLog | None: ...


def speculation_record(
    logs: SequenceOf[_LogOfReplica], pool_by_replica: SequenceOf[int]
) -> SpeculationRecord | None:
    """Returns the record of a run; None if no replica speculates. The bursts of the logs are dropped."""
    drafting = [(log.replica, log.drafts) for log in logs if log.drafts is not None]
    if not drafting:
        return None
    drafted_by_pool: dict[int, Ints] = {}
    accepted_by_pool: dict[int, Ints] = {}
    bursts = []
    for replica, log in drafting:
        pool = pool_by_replica[replica]
        drafted, accepted, own_bursts = log.bursts.take(replica)
        drafted_by_pool[pool] = drafted_by_pool.get(pool, 0) + drafted
        accepted_by_pool[pool] = accepted_by_pool.get(pool, 0) + accepted
        bursts.append(own_bursts)
    tables = []
    for pool, drafted in sorted(drafted_by_pool.items()):
        num_places = int(np.count_nonzero(drafted))
        columns = {"pool": np.full(num_places, pool), "place": np.arange(1, num_places + 1)}
        counts = {"drafted": drafted[:num_places], "accepted": accepted_by_pool[pool][:num_places]}
        tables.append(Table(columns | counts))
    return SpeculationRecord(
        acceptance=joined(tables),
        bursts=joined(bursts),
    )


def added_acceptance(tables: SequenceOf[AnyTable]) -> Table:
    """Returns the sums of tables of acceptance by pool and place: see `SpeculationRecord.acceptance`."""
    whole = joined(tables)
    keys, row = np.unique(np.stack([whole["pool"], whole["place"]]), axis=1, return_inverse=True)
    columns = {"pool": keys[0], "place": keys[1]}
    for name in ("drafted", "accepted"):
        columns[name] = np.zeros(keys.shape[1], np.int64)
        np.add.at(columns[name], row, whole[name])
    return Table(columns)
