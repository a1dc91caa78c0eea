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

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwmodels.iterations.iteration import IterationModel
from hwmodels.speculation.model import SpeculativeModel
from policies.speculation.view import AcceptanceCounts
from sim.metrics.kept_tokens import iteration_ends_s
from sim.metrics.measured import Measured
from sim.metrics.sums import weighted_sum
from sim.metrics.utilisation import iteration_shape
from sim.records.run import RunRecords

_ROWS_AT_ONCE = 1 << 16
COUNTS = ("draft_passes", "verified_tokens", "accepted_tokens", "kept_tokens", "proposed_tokens")


def speculation_use(
    records: RunRecords, part: Measured, models: Sequence[IterationModel]
) -> dict[str, dict[str, Any]]:
    """Returns the section `speculation` of the summary; nothing if no pool speculates.

    models: hardware models, one per pool.
    """
    record = records.speculation
    if record is None:
        return {}
    inside = part.window.holds(iteration_ends_s(records))
    columns = {name: records.iterations[name].to_numpy()[inside] for name in COUNTS}
    passes, verified, accepted, kept, proposed = (int(columns[name].sum()) for name in COUNTS)
    num_bursts = int(part.gaps_inside.sum())
    by_pool = {
        pool.name: _rows(acceptance_by_place(record.acceptance[record.acceptance["pool"] == index]))
        for index, pool in enumerate(records.pools)
    }
    whole = record.acceptance.groupby("place", as_index=False)[["drafted", "accepted"]].sum()
    return {
        "speculation": {
            "drafts": passes,
            "draft_tokens": verified,
            "accepted_tokens": accepted,
            "kept_tokens": kept,
            "acceptance_rate": _per(accepted, verified),
            "mean_accepted_length": 1 + _per(accepted, passes),
            "tokens_per_pass": _per(num_bursts + kept, num_bursts),
            "draft_tokens_per_draft": _per(verified, passes),
            "wasted_tokens": {
                "rejected": verified - accepted,
                "discarded": accepted - kept,
                "unused": max(proposed - verified, 0),
            },
            "flops": wasted_flops(records, inside, models),
            "by_place": _rows(acceptance_by_place(whole)),
            **({"by_place_and_pool": by_pool} if len(records.pools) > 1 else {}),
        }
    }


def acceptance_by_place(counts: pd.DataFrame) -> pd.DataFrame:
    """Adds the rates to the counts of `SpeculationRecord.acceptance`.

    rate: share of the passes with a draft token at the place that accepted one, as vLLM's
    vllm:spec_decode_num_accepted_tokens_per_pos over the drafts. conditional_rate: share of those in which
    all places before were accepted, see `AcceptanceCounts.reached`.

    Example: 100 passes with 2 draft tokens each, of which 80 and 60 are accepted: rates of 0.8 and 0.6,
    conditional 0.8 and 0.75.
    """
    drafted, accepted = (counts[name].to_numpy(np.int64) for name in ("drafted", "accepted"))
    reached = AcceptanceCounts(drafted, accepted).reached()
    return counts.assign(rate=_shares(accepted, drafted), conditional_rate=_shares(accepted, reached))


def acceptance_by_pool(counts: pd.DataFrame) -> pd.DataFrame:
    """Adds the rates to the counts of each pool; see `acceptance_by_place`."""
    pools = [acceptance_by_place(own) for _, own in counts.groupby("pool")]
    return pd.concat(pools, ignore_index=True) if pools else acceptance_by_place(counts)


def wasted_flops(
    records: RunRecords, inside: NDArray[np.bool_], models: Sequence[IterationModel]
) -> dict[str, float]:
    """Computes the FLOPs of iterations by purpose, and the share of those in vain, over pools that speculate.

    Example: 10 of 40 rows of draft tokens are kept: three quarters of the FLOPs of these rows are in vain.
    """
    needed = in_vain = drafting = 0.0
    for model, of_pool in zip(models, records.rows_by_pool(), strict=True):
        if not isinstance(model, SpeculativeModel):
            continue
        iterations = records.iterations[of_pool][inside[of_pool]]
        for start in range(0, len(iterations), _ROWS_AT_ONCE):
            rows = iterations.iloc[start : start + _ROWS_AT_ONCE]
            flops = model.flops_by_purpose(iteration_shape(rows, model))
            num_rows = rows["draft_tokens"].to_numpy() + model.pass_tokens * rows["decode_seqs"].to_numpy()
            kept = _shares(rows["kept_tokens"].to_numpy(), num_rows)
            useful = np.where(num_rows > 0, kept, 0.0)
            draft_rows = np.broadcast_to(flops.draft_rows, useful.shape)
            every = np.ones(len(rows))
            needed += weighted_sum(np.broadcast_to(flops.next_tokens, useful.shape), every)
            needed += weighted_sum(draft_rows, useful)
            in_vain += weighted_sum(draft_rows, 1 - useful)
            drafting += weighted_sum(np.broadcast_to(flops.drafting, useful.shape), every)
    total = needed + in_vain + drafting
    return {
        "tokens": needed,
        "rejected_rows": in_vain,
        "drafting": drafting,
        "wasted_share": _per(in_vain + drafting, total),
    }


def _rows(places: pd.DataFrame) -> list[dict[str, float]]:
    names = ("place", "drafted", "accepted", "rate", "conditional_rate")
    columns = [places[name].tolist() for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _shares(part: NDArray[Any], whole: NDArray[Any]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = np.full(len(part), np.nan)
    np.divide(part, whole, out=shares, where=whole > 0)
    return shares


def _per(part: float, whole: float) -> float:
    return part / whole if whole > 0 else float("nan")
