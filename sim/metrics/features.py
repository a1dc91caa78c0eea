"""Metrics of speculative decoding, LoRA adapters, KV transfers and live migrations.

Speculative decoding:

    draft      a pass of a sequence with at least one draft token (vLLM: vllm:spec_decode_num_drafts)
    place      1 for the first draft token of a pass; with a tree, the depth of a token

    acceptance_rate       accepted / verified draft tokens
    mean_accepted_length  1 + accepted draft tokens / drafts, as vLLM logs it: tokens per draft
    tokens_per_pass output tokens after the first / passes that produced them, including passes without drafts
    by_place passes with a draft token at a place, and the share of them that accepted it; also the share
    given that all earlier places were accepted

A draft token is wasted ("in vain") if it was rejected, accepted but after the end of the output (discarded),
or drafted but not verified (unused) because its sequence had ended, was preempted or had no budget left. The
wasted FLOPs are those of rows that were not kept and all of drafting: they would not be needed without
speculation.

Counts are those of iterations that end in the measured time; by_place covers the whole run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations import IterationModel
from hwmodels.speculation import SpeculativeModel
from policies.adapters.serving import AdapterCounts
from policies.speculation import AcceptanceCounts
from sim.metrics.definitions import describe, per, times
from sim.metrics.figure import EndedRun, Figure, FigureSetting, Part, iteration_shape, pieces
from sim.metrics.sums import Totals
from sim.records.event_rows import TIERS, Event
from sim.records.run import Outcome, RunRecords
from sim.records.table import AnyTable, Table, column, joined

COUNTS = ("draft_passes", "verified_tokens", "accepted_tokens", "kept_tokens", "proposed_tokens")


class SpeculationUse(Figure):
    """The section `speculation`; None if no pool speculates."""

    name = "speculation"

    def add(self, part: Part) -> None:
        self.inside.add("gap_tokens", part.gaps_inside)
        if COUNTS[0] not in part.iterations:
            return
        drafting = part.iterations[part.ends_inside]
        for name in COUNTS:
            self.inside.add(name, column(drafting, name))
        for pool, of_pool in zip(part.setting.pools, part.rows_by_pool, strict=True):
            iterations = part.iterations[of_pool][part.ends_inside[of_pool]]
            for rows in pieces(len(iterations)):
                add_flops(self.inside, iterations[rows], pool.model)

    def value(self, run: EndedRun) -> dict[str, Any] | None:
        if run.records.speculation is None:
            return None
        pools, acceptance = [pool.name for pool in run.records.pools], run.records.speculation.acceptance
        num_bursts = int(self.inside["gap_tokens"])
        passes, verified, accepted, kept, proposed = (self.inside[name] for name in COUNTS)
        by_pool = {
            pool: _rows(acceptance_by_place(acceptance[column(acceptance, "pool") == index]))
            for index, pool in enumerate(pools)
        }
        whole = _of_all_pools(acceptance)
        return {
            "drafts": passes,
            "draft_tokens": verified,
            "accepted_tokens": accepted,
            "kept_tokens": kept,
            "acceptance_rate": per(accepted, verified),
            "mean_accepted_length": 1 + per(accepted, passes),
            "tokens_per_pass": per(num_bursts + kept, num_bursts),
            "draft_tokens_per_draft": per(verified, passes),
            "wasted_tokens": {
                "rejected": verified - accepted,
                "discarded": accepted - kept,
                "unused": max(proposed - verified, 0),
            },
            "flops": wasted_flops(self.inside),
            "by_place": _rows(acceptance_by_place(whole)),
            **({"by_place_and_pool": by_pool} if len(pools) > 1 else {}),
        }


def acceptance_by_place(counts: AnyTable) -> AnyTable:
    """Adds the rates to the counts of `SpeculationRecord.acceptance`.

    rate: share of the passes with a draft token at the place that accepted it, as vLLM's
    vllm:spec_decode_num_accepted_tokens_per_pos divided by the drafts. conditional_rate: the same share among
    passes that accepted all earlier places, see `AcceptanceCounts.reached`.

    Example: 100 passes with 2 draft tokens each, of which 80 and 60 are accepted: rates of 0.8 and 0.6,
    conditional 0.8 and 0.75.
    """
    drafted, accepted = (column(counts, name, np.int64) for name in ("drafted", "accepted"))
    reached = AcceptanceCounts(drafted, accepted).reached()
    return counts.assign(rate=_shares(accepted, drafted), conditional_rate=_shares(accepted, reached))


def acceptance_by_pool(counts: AnyTable) -> AnyTable:
    """Adds the rates to the counts of each pool; see `acceptance_by_place`."""
    pool = column(counts, "pool")
    pools = [acceptance_by_place(counts[pool == one]) for one in np.unique(pool)]
    return joined(pools or [acceptance_by_place(counts)])


def add_flops(totals: Totals, iterations: AnyTable, model: IterationModel) -> None:
    """Adds the FLOPs of up to `ROWS_AT_ONCE` iterations of a pool by purpose, if it speculates."""
    if not isinstance(model, SpeculativeModel):
        return
    flops = model.flops_by_purpose(iteration_shape(iterations, model))
    num_rows = column(iterations, "draft_tokens") + model.pass_tokens * column(iterations, "decode_seqs")
    kept = _shares(column(iterations, "kept_tokens"), num_rows)
    useful = np.where(num_rows > 0, kept, 0.0)
    draft_rows = np.broadcast_to(flops.draft_rows, useful.shape)
    totals.add("flops_of_tokens", np.array(np.broadcast_to(flops.next_tokens, useful.shape), np.float64))
    totals.add("flops_of_tokens", np.multiply(draft_rows, useful))
    totals.add("flops_in_vain", np.multiply(draft_rows, 1 - useful))
    totals.add("flops_of_drafting", np.array(np.broadcast_to(flops.drafting, useful.shape), np.float64))


def wasted_flops(totals: Totals) -> dict[str, float]:
    """Returns the FLOPs of iterations by purpose, and the wasted share, over pools that speculate.

    Example: 10 of 40 rows of draft tokens are kept: three quarters of the FLOPs of these rows are in vain.
    """
    names = ("flops_of_tokens", "flops_in_vain", "flops_of_drafting")
    needed, in_vain, drafting = (float(totals[name]) for name in names)
    total = needed + in_vain + drafting
    return {
        "tokens": needed,
        "rejected_rows": in_vain,
        "drafting": drafting,
        "wasted_share": per(in_vain + drafting, total),
    }


def _of_all_pools(acceptance: AnyTable) -> Table:
    """Returns the sums over the pools by place."""
    places, row = np.unique(column(acceptance, "place"), return_inverse=True)
    sums = {name: np.zeros(len(places), np.int64) for name in ("drafted", "accepted")}
    for name, counts in sums.items():
        np.add.at(counts, row, column(acceptance, name))
    return Table({"place": places, **sums})


def _rows(places: AnyTable) -> list[dict[str, float]]:
    names = ("place", "drafted", "accepted", "rate", "conditional_rate")
    columns = [column(places, name).tolist() for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _shares(part: NDArray[Any], whole: NDArray[Any]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = np.full(len(part), np.nan)
    np.divide(part, whole, out=shares, where=whole > 0)
    return shares


class AdapterUse(Figure):
    """Use of adapters over all replicas and the whole run; None if no adapters are served.

    hit_share: share of the started sequences for which the adapter was already loaded. batch_adapters: number
    of different adapters in an iteration, mean over the iterations with at least one.
    """

    name = "adapters"

    def add(self, part: Part) -> None:
        if "adapters" in part.iterations:
            different = times(part.iterations, "adapters")
            self.whole.add("different", different[different > 0])
            self.whole.add("with_adapters", different > 0)

    def value(self, run: EndedRun) -> dict[str, Any] | None:
        by_replica = list(run.records.adapters)
        if not by_replica:
            return None
        counts = {name: sum(getattr(one, name) for one in by_replica) for name in AdapterCounts.__slots__}
        num_some = self.whole["with_adapters"]
        return {
            "hit_share": per(counts["num_hits"], counts["num_starts"]),
            "loads": counts["num_loads"],
            "loads_from_disk": counts["num_loads_from_disk"],
            "loaded_bytes": counts["loaded_bytes"],
            "evictions": counts["num_evicted"],
            "batch_adapters": self.whole["different"] / num_some if num_some else 0.0,
        }


def transferred(requests: AnyTable) -> AnyTable:
    """Returns the rows of requests with a prefill replica; none if the table does not name it."""
    if "prefill_replica" not in requests:
        return requests[:0]
    return requests[column(requests, "prefill_replica") >= 0]


class KvTransferUse(Figure):
    """KV transfers of the measured requests, and the use of the links; None if no KV was transferred.

    seconds: from the allocation on the decode replica to the last byte. tokens, cached_tokens: tokens of the
    sequences transferred in the whole run, and how many of these were in the decode replica's cache.
    share_of_e2e: transfer seconds of finished requests divided by their E2E. links: utilisation over the
    whole run (carried bytes / capacity): the mean over the ports and switches in use, and the maximum.
    """

    name = "kv_transfer"

    def __init__(self, setting: FigureSetting) -> None:
        super().__init__(setting)
        self.seconds = self.kept.values()

    def merge(self, other: KvTransferUse) -> None:
        super().merge(other)
        self.seconds.merge(other.seconds)

    def forget_measured(self) -> None:
        super().forget_measured()
        self.seconds = self.kept.values()

    def add(self, part: Part) -> None:
        self.whole.add("transferred", np.ones(len(transferred(part.requests)), np.bool_))
        event, tokens, tier = (column(part.events, name) for name in ("event", "tokens", "tier"))
        is_copied = (event == Event.load) & (tier == TIERS.index("remote"))
        self.whole.add("adopted_tokens", tokens[event == Event.adopt])
        self.whole.add("copied_tokens", tokens[is_copied])
        rows = transferred(part.measured)
        if len(rows):
            finished = rows[~np.isnan(times(rows, "e2e_s"))]
            seconds = times(rows, "kv_transfer_s")
            self.seconds.add(seconds)
            self.inside.add("transfers", np.isfinite(seconds))
            self.inside.add("bytes", times(rows, "kv_transfer_bytes"))
            of_finished_s = times(finished, "kv_transfer_s")
            self.inside.add("transfer_s_of_finished", of_finished_s[~np.isnan(of_finished_s)])
            self.inside.add("e2e_s", times(finished, "e2e_s"))

    def value(self, run: EndedRun) -> dict[str, Any] | None:
        if not self.whole["transferred"]:
            return None
        inside, end_s = self.inside, run.records.end_s
        used = {
            link.name: link.carried_bytes / (link.bytes_per_s * end_s)
            for link in run.records.links
            if link.bytes_per_s and end_s
        }
        fullest = max(used, key=lambda name: used[name], default="")
        num_tokens = self.whole["adopted_tokens"]
        return {
            "tokens": num_tokens,
            "cached_tokens": max(num_tokens - self.whole["copied_tokens"], 0),
            "requests": inside["transfers"],
            "bytes": float(inside["bytes"]),
            "seconds": self.seconds.describe(),
            "share_of_e2e": per(inside["transfer_s_of_finished"], inside["e2e_s"]),
            "links": {
                "mean_share": float(np.mean(list(used.values()))) if used else float("nan"),
                "fullest_share": used.get(fullest, float("nan")),
                "fullest": fullest,
            },
        }


def migration_figures(records: RunRecords) -> dict[str, Any]:
    """Computes the metrics of all migrations of a run with a migration policy, over the whole run.

    count: number of moves. given_up: migrations without effect, by outcome. bytes: copied KV, including by
    migrations without effect. stages: mean over the moved requests. downtime: seconds from the last token on
    the source to the start of the first iteration on the target. duration: seconds from the decision to the
    last byte. share_of_time: share of the replicas' paid time in which one is part of a migration.

    Example: a request stops at 7.0 s, its last KV arrives at 7.3 s, and the target begins its next iteration
    at 7.5 s: a downtime of 0.5 s.
    """
    found = records.migrations or ()
    moved = [one for one in found if one.outcome is Outcome.moved]
    ends_s, begins_s = (np.array([getattr(one, name) for one in found]) for name in ("ended_s", "began_s"))
    paid_s = sum(replica.end_s - replica.start_s for replica in records.replicas)
    return {
        "count": len(moved),
        "requests": len({one.request_id for one in moved}),
        "given_up": {
            outcome.name: sum(one.outcome is outcome for one in found)
            for outcome in Outcome
            if outcome is not Outcome.moved
        },
        "bytes": float(sum(one.num_bytes for one in found)),
        "stages": float(np.mean([one.num_stages for one in moved])) if moved else float("nan"),
        "downtime": describe(np.array([one.resumed_s - one.stopped_s for one in moved])),
        "duration": describe(np.array([one.ended_s - one.began_s for one in moved])),
        "share_of_time": 2 * float((ends_s - begins_s).sum()) / paid_s if paid_s > 0 else float("nan"),
    }
