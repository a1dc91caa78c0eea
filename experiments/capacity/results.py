"""Results of a search: figures with confidence intervals, and why other candidates are not in the ranking."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.capacity.candidates import Candidate, Question
from experiments.capacity.probe import Run, at_target, keeps
from experiments.capacity.search import Search, State, Status
from hwmodels.iterations import IterationShape
from hwmodels.iterations.ops import decode_shape, prefill_shape
from sim.metrics.confidence import Interval, Paired, compare_paired, mean_interval
from sim.report.wording import LATENCIES, WAITS, plural

TABLE_FIGURES = ("output_tokens_per_s", "goodput_per_s", "tpot_p50_s", "watts")
"""Figures of the table of candidates, besides the latencies at the percentile of the target."""
FEW = 0.05
"""Least share of the waiting time beyond the running iteration that is mentioned."""
MOST_NAMES = 4
"""Largest number of candidates that a line lists by name."""


class Limit(NamedTuple):
    """Limit of the SLO that is missed with one replica fewer, and the resource that causes it."""

    term: str
    resource: str
    share: float
    """Share of the measured requests that meet this limit."""

    def __str__(self) -> str:
        return f"{LATENCIES.get(self.term, self.term)}: {self.resource}"

    @property
    def cause(self) -> str:
        """The resource, and how many requests meet the limit, in words."""
        return f"{self.resource}; {100 * self.share:.3g} % of the measured requests meet it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """Candidate that meets the SLO, with the number of replicas that it needs."""

    candidate: Candidate
    num_up: int
    replicas: int
    """Replicas to rent, spares included."""
    usd_per_hour: float
    share_at_margin: Interval
    """Share within the SLO with num_up replicas, at the traffic with headroom and growth."""
    figures: Mapping[str, Interval]
    """Figures with all replicas, at the traffic without headroom; see `derived`."""
    limit: Limit | None
    """Limit that fails with one replica fewer; None if no such run was made."""
    ahead: Paired | None
    """USD per million tokens, compared with the winner; None for the winner."""

    @property
    def num_devices(self) -> int:
        return self.replicas * self.candidate.num_devices


def ranked_of(
    search: Search, finals: Mapping[str, Sequence[Run]], last: Collection[str] = ()
) -> list[Ranked]:
    """Returns the ranking, best first; finals: candidate -> runs with all replicas and no headroom.

    last: candidates that come last, whatever they cost.
    """
    rows: list[Ranked] = []
    settings = search.question.settings
    winner: list[float] = []
    top = search.ranked()[: settings.top]
    for state in sorted(top, key=lambda one: one.candidate.name in last):
        if state.candidate.name not in finals or state.num_up is None:
            continue
        replicas = search.replicas(state)
        usd = search.least_cost(state)
        columns = derived(finals[state.candidate.name], usd, replicas * state.candidate.num_devices)
        shares = [run.share for run in state.runs[state.num_up]]
        costs = columns["usd_per_million_output_tokens"]
        rows.append(
            Ranked(
                candidate=state.candidate,
                num_up=state.num_up,
                replicas=replicas,
                usd_per_hour=usd,
                share_at_margin=_intervals(state.runs[state.num_up], {"share": shares})["share"],
                figures=_intervals(finals[state.candidate.name], columns),
                limit=limit_of(state, search.question),
                ahead=compare_paired(costs, winner) if winner else None,
            )
        )
        winner = winner or costs
    return rows


OF_GOODPUT = ("goodput_per_s_and_gpu", "good_requests_per_usd", "good_requests_per_kwh")
"""Figures that are goodput times a constant."""


def _intervals(runs: Sequence[Run], columns: Mapping[str, Sequence[float]]) -> dict[str, Interval]:
    """Returns figures with their intervals over the seeds, or over blocks of a trace, which has one run."""
    found = {name: mean_interval(values) for name, values in columns.items()}
    if len(runs) > 1 or not runs[0].intervals:
        return found
    own = {name: one for name, one in runs[0].intervals.items() if name in found}
    if "goodput_per_s" in own and own["goodput_per_s"].mean > 0:
        mean, low, high, count = own["goodput_per_s"]
        for name in OF_GOODPUT:
            times = found[name].mean / mean
            own[name] = Interval(found[name].mean, times * low, times * high, count)
    return {**found, **own}


def derived(runs: Sequence[Run], usd_per_hour: float, num_devices: int) -> dict[str, list[float]]:
    """Returns by name one value per seed: the measured figures, and those derived from price and GPUs."""
    columns: dict[str, list[float]] = {name: [run.figures[name] for run in runs] for name in runs[0].figures}
    columns["share"] = [run.share for run in runs]
    good, tokens = columns["goodput_per_s"], columns["output_tokens_per_s"]
    columns["good_requests_per_usd"] = [
        3600 * each / usd_per_hour if usd_per_hour else math.nan for each in good
    ]
    columns["break_even_load"] = [
        usd_per_hour / bill if bill > 0 else math.nan for bill in columns["bill_usd_per_hour"]
    ]
    columns["goodput_per_s_and_gpu"] = [each / num_devices for each in good]
    columns["good_requests_per_kwh"] = [
        3.6e6 * each / watts if watts > 0 else math.nan
        for each, watts in zip(good, columns["watts"], strict=True)
    ]
    columns["tokens_per_s_and_gpu"] = [each / num_devices for each in tokens]
    columns["tokens_per_s_and_user"] = [1 / each if each > 0 else math.nan for each in columns["tpot_p50_s"]]
    return columns


def limit_of(state: State, question: Question) -> Limit | None:
    """Returns the term that the largest failing fleet misses most, and the resource that it waits for."""
    run = failing_run(state, question)
    return None if run is None else limit_of_run(run, state)


def failing_run(state: State, question: Question) -> Run | None:
    """Returns a failing run of the largest fleet that misses the SLO, None if there is none."""
    for number in sorted(state.runs, reverse=True):
        for run in state.runs[number]:
            if not keeps(run, question.slo):
                return run
    return None


def limit_of_run(run: Run, state: State) -> Limit:
    """Returns the limit that a failing run misses most, and the resource that causes it."""
    slo = state.candidate.scenario.slo
    assert slo is not None
    excess = {term: run.term_limits_s[term] / limit_s for term, limit_s in slo.limits_s.items()}
    term = max(excess, key=lambda name: excess[name] if math.isfinite(excess[name]) else math.inf)
    share = run.term_shares[term]
    waits = {cause: s for cause, s in run.waits.items() if cause not in ("iteration", "frontend")}
    waited_s = sum(waits.values())
    if term != "tpot" and waited_s > 0.1 * slo.limits_s[term]:
        cause = max(waits, key=lambda name: waits[name])
        if cause in ("memory", "slot"):
            return Limit(term, f"queueing for {'KV memory' if cause == 'memory' else 'slots'}", share)
        if cause not in ("budget", "policy", "gateway"):
            return Limit(term, f"queueing, {WAITS.get(cause, cause)}", share)
    queue = "queueing, " if term != "tpot" and waited_s > 0.1 * slo.limits_s[term] else ""
    return Limit(term, f"{queue}{_bound(state, run, term)}", share)


def _bound(state: State, run: Run, term: str) -> str:
    """Returns the resource that bounds the iterations of a term: prefills for TTFT, otherwise decodes."""
    model = state.candidate.scenario.iteration_model()
    seqs, context = run.batch
    shape: IterationShape
    if term == "ttft" or not seqs:
        shape = prefill_shape(1, max(1, round(context) or 1))
    else:
        shape = decode_shape(max(1, round(seqs)), max(1, round(context)))
    shares: dict[str, float] = defaultdict(float)
    for line in model.explain(shape):
        shares[line.bound] += line.share
    bound = max(shares, key=lambda name: shares[name])
    return "memory bandwidth" if bound == "memory" else bound


def candidates_table(search: Search, refused: Sequence[Any]) -> pd.DataFrame:
    """Returns one row per candidate: its labels, outcome, bounds, and the figures of its runs."""
    rows: list[dict[str, Any]] = []
    for state in search.states:
        status = search.status(state)
        number = state.num_up
        runs = state.runs.get(number, []) if number is not None else []
        rows.append(
            {
                "candidate": state.candidate.name,
                **state.candidate.parts,
                "status": status.name,
                "reason": reason_of(state, status, search),
                "gpus_per_replica": state.candidate.num_devices,
                "usd_per_hour_of_a_replica": state.candidate.usd_per_hour,
                "highest_share_by_bound": math.nan if state.ceiling is None else state.ceiling.share,
                "least_replicas_by_bound": math.nan
                if state.ceiling is None
                else max(state.ceiling.replicas.values()),
                "least_usd_per_hour": search.least_cost(state),
                "runs": sum(len(runs) for runs in state.runs.values()),
                "replicas_up": math.nan if number is None else number,
                "replicas": math.nan if number is None else search.replicas(state),
                "share": math.nan if not runs else float(np.mean([run.share for run in runs])),
                **{
                    name: math.nan if not runs else float(np.mean([run.figures[name] for run in runs]))
                    for name in (*TABLE_FIGURES, *map(at_target, search.question.slo.limits_s))
                },
            }
        )
    rows += [
        {"candidate": one.name, **one.parts, "status": "refused", "reason": one.reason} for one in refused
    ]
    return pd.DataFrame(rows)


def reason_of(state: State, status: Status, search: Search) -> str:
    """Returns the reason why a candidate does not meet the SLO or was not searched; empty if it was found."""
    slo, ceiling = search.question.slo, state.ceiling
    target = f"{100 * slo.attainment_target:g} %"
    if status is Status.found:
        return ""
    least = f"at least {_replicas(state.bracket.least)}, ${search.least_cost(state):,.2f}/hour"
    if ceiling is None and status is Status.beyond:
        most, least_up = state.bracket.most, state.candidate.least_up
        needs = (
            f"its router needs {least_up:,} running replicas"
            if least_up > most
            else "with its spares it needs"
        )
        return f"{needs} more than capacity.max_replicas={search.question.settings.max_replicas:,}"
    if ceiling is None:
        return f"{least} (the price of its GPUs)"
    if ceiling.share < slo.attainment_target:
        term = min(ceiling.term_shares, key=lambda name: ceiling.term_shares[name])
        return (
            f"SLO attainment at most {100 * ceiling.share:.3g} % even on an idle replica (target {target}): "
            f"for {target} of the requests, the limit of {LATENCIES[term]} would have to be at least "
            f"{1e3 * ceiling.term_limits_s[term]:.4g} ms, not {1e3 * slo.limits_s[term]:g} ms"
        )
    resource = max(ceiling.replicas, key=lambda name: ceiling.replicas[name])
    if status is Status.ruled_out:
        return (
            f"{resource}: needs at least {_replicas(ceiling.replicas[resource])}, more than the "
            f"{state.bracket.most:,} allowed"
        )
    if status is Status.beyond:
        return f"{_replicas(state.bracket.fails)} {'is' if state.bracket.fails == 1 else 'are'} not enough"
    if status is Status.never_reached:
        return f"{least} (bound: {resource})"
    return least


def _replicas(count: int) -> str:
    return f"{count:,} replica{'s' * (count != 1)}"


class Excluded(NamedTuple):
    """Candidate that cannot run or cannot meet the SLO."""

    name: str
    reason: str
    """Short reason, the same for all candidates that it applies to."""
    detail: str
    """Reason with the candidate's own figures."""


def excluded(question: Question, search: Search) -> list[Excluded]:
    """Returns the excluded candidates, without those that were not searched because of their cost."""
    found = [Excluded(one.name, one.kind, one.reason) for one in question.refused]
    for state in search.states:
        status = search.status(state)
        if status in (Status.ruled_out, Status.beyond):
            detail = reason_of(state, status, search)
            found.append(Excluded(state.candidate.name, _reason(state, search), detail))
    return found


def by_reason(found: list[Excluded]) -> dict[str, list[Excluded]]:
    """Groups by reason, the most frequent one first."""
    groups: dict[str, list[Excluded]] = {}
    for one in found:
        groups.setdefault(one.reason, []).append(one)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def exclusion_lines(found: list[Excluded]) -> list[str]:
    """Returns a line per reason: the number of candidates, their names, and the figures of the first."""
    lines = []
    for reason, own in by_reason(found).items():
        names = ", ".join(one.name for one in own[:MOST_NAMES])
        more = f" and {len(own) - MOST_NAMES} more" if len(own) > MOST_NAMES else ""
        example = f"{own[0].name}: {own[0].detail}"
        shown = f"{names}{more}. For example, {example}" if len(own) > 1 else example
        lines.append(f"{len(own):,} excluded, {reason}: {shown}")
    return lines


def effort(question: Question, search: Search) -> str:
    """Returns a sentence that counts every candidate once, by its outcome, and the runs."""
    by_status: dict[Status, int] = {}
    for state in search.states:
        status = search.status(state)
        by_status[status] = by_status.get(status, 0) + 1
    out = excluded(question, search)
    parts = []
    if kept := by_status.get(Status.found, 0):
        parts.append(f"{kept} meet{'s' * (kept == 1)} the SLO")
    parts += [f"{len(own)} excluded ({reason})" for reason, own in by_reason(out).items()]
    for status, how in (
        (Status.costlier, "simulated but not"),
        (Status.never_reached, "neither simulated nor"),
    ):
        if left := by_status.get(status, 0):
            costs = "costs" if left == 1 else "cost"
            parts.append(f"{left} {how} ranked ({costs} at least as much as the last ranked one)")
    if opened := by_status.get(Status.open, 0):
        parts.append(f"{opened} undecided")
    simulated = sum(bool(state.runs) for state in search.states)
    runs = sum(len(runs) for state in search.states for runs in state.runs.values())
    total = plural(len(search.states) + len(question.refused), "candidate")
    made = f"; {plural(runs, 'run')} of {plural(simulated, 'candidate')}" if runs else ""
    return f"{total}: {', '.join(parts)}{made}."


def exclusions_json(found: list[Excluded]) -> list[dict[str, Any]]:
    """Returns the reasons, the numbers of candidates and their names as plain values."""
    return [
        {"reason": reason, "candidates": len(own), "names": [one.name for one in own]}
        for reason, own in by_reason(found).items()
    ]


def _reason(state: State, search: Search) -> str:
    slo, ceiling, most = search.question.slo, state.ceiling, search.question.settings.max_replicas
    if ceiling is not None and ceiling.share < slo.attainment_target:
        term = min(ceiling.term_shares, key=lambda name: ceiling.term_shares[name])
        return f"{LATENCIES[term]} is missed even on an idle replica"
    return f"more than capacity.max_replicas={most:,} would be needed"
