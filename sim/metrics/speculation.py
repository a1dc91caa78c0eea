"""Computes the figures of speculative decoding: acceptance, mean accepted length, tokens and FLOPs in vain.

    draft      a pass of a sequence with at least one draft token (vLLM: vllm:spec_decode_num_drafts)
    place      1 for the first draft token of a pass; with a tree, the depth of a token

    acceptance_rate       accepted / verified draft tokens
    mean_accepted_length  1 + accepted draft tokens / drafts, as vLLM logs it: tokens per draft
    tokens_per_pass       output tokens after the first / passes that brought them, also passes without drafts
    by_place              passes with a draft token at a place, and the share of them that accepted it; given
                          that the places before were accepted, too

A draft token is in vain if it was rejected, accepted but behind the end of the answer (discarded), or made
and not verified (unused), as its sequence had ended, was preempted or had no budget left. Of the FLOPs, those
of rows that were not kept and all of drafting are in vain: without speculation they would not be needed.

Counts are those of iterations that end in the measured time; by_place covers the whole run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations.iteration import IterationModel
from hwmodels.speculation.model import SpeculativeModel
from policies.speculation.view import AcceptanceCounts
from sim.metrics.definitions import per
from sim.metrics.figure import EndedRun, Figure, Part
from sim.metrics.sums import Totals
from sim.metrics.utilisation import iteration_shape, pieces
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

    rate: share of the passes with a draft token at the place that accepted one, as vLLM's
    vllm:spec_decode_num_accepted_tokens_per_pos over the drafts. conditional_rate: share of those in which
    all places before were accepted, see `AcceptanceCounts.reached`.

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
    """Returns the FLOPs of iterations by purpose, and the share of those in vain, over pools that speculate.

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
