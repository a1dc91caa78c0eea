"""The records of speculation in a run: acceptance by place, and the bursts of every request."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from policies.speculation.engine.drafts import Ints
from sim.records.iterations import IterationLog
from sim.records.table import AnyTable, Table, joined


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationRecord:
    """Records of the draft tokens of a run.

    acceptance: one row per pool and place, by (pool, place), over the whole run: `drafted`, the passes that
      verified a draft token at the place (with a tree: tokens at the depth), and `accepted`, those that
      accepted one. Passes of sequences that had ended before do not count. place: 1 is the first draft token.
    bursts: one row per pass that kept draft tokens: request_id, replica, iteration, kept_tokens. They came
      together with one further token at the end of that iteration.
    """

    acceptance: AnyTable
    bursts: AnyTable


def speculation_record(
    logs: SequenceOf[IterationLog], pool_by_replica: SequenceOf[int]
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
