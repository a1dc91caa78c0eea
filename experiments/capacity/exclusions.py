"""Counts the candidates by outcome, and names the reason why each of the others is not in the ranking."""

from __future__ import annotations

from typing import Any, NamedTuple

from experiments.capacity.candidates import Question
from experiments.capacity.results import reason_of
from experiments.capacity.search import Search, State, Status
from sim.report.wording import LATENCIES, plural

MOST_NAMES = 4
"""Largest number of candidates that a line lists by name."""


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


def to_json(found: list[Excluded]) -> list[dict[str, Any]]:
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
