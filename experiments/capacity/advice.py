"""Advice if no candidate meets the SLO: the limits that the best one misses, and the changes that would help.

Every suggestion (a looser limit, a lower request rate, another GPU) is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.app.settings.config_groups import find_groups
from experiments.app.settings.override import Override
from experiments.app.settings.variants import Variants
from experiments.capacity.candidates import Candidate, Question, build_candidates
from experiments.capacity.probe import Probe, Run, keeps
from experiments.capacity.search import Search, State, begin
from experiments.study.bisection import FACTOR, MAX_STEPS, bisected, bracketed
from experiments.study.workers import in_turn
from sim.engine.clock import Interrupt
from sim.metrics.definitions import plain_json
from sim.metrics.slo import Slo
from sim.report.numbers import number
from sim.report.wording import LATENCIES

RATE_PRECISION = 0.05
HALF = 0.5
LEAST_LOAD = HALF / FACTOR**MAX_STEPS
"""Multiple of the traffic below which the search for a lower rate stops."""
NUM_CLOSE = 2
"""Candidates simulated to the end: so many that were simulated before, and so many that were not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Closest candidate, its misses, and the changes with which the SLO would be met."""

    best: str
    """Name of the candidate that comes closest to the SLO."""
    replicas: int
    """Replicas that it was simulated with, the largest number allowed."""
    share: float
    """Share of its requests within the SLO."""
    terms: Mapping[str, tuple[float, float]]
    """Missed term -> its limit, and the smallest limit that enough requests would meet; in seconds."""
    looser: Mapping[str, float]
    """Term -> the smallest limit with which the whole SLO would be attained, in seconds."""
    load: float | None
    """Largest multiple of the traffic at which it meets the SLO; None if there is none."""
    misses_idle: bool
    """True if, by a bound, even idle replicas miss the SLO; a lower rate is then not searched for."""
    rate_per_s: float
    """Request rate of the traffic, margins included."""
    other: tuple[str, int, float] | None
    """Fleet of a GPU outside the search: candidate, replicas, USD per hour; None if none meets the SLO."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RateTask:
    """Task that finds the highest multiple of a load at which a candidate meets the SLO."""

    name: str
    probe: Probe

    def run(self) -> float:
        """Returns the multiple of the load, 0 if the SLO is met at none."""
        slo = self.probe.scenario.slo

        def kept(share: float) -> bool:
            runs = replace(self.probe, load=self.probe.load * share).run()
            return all(keeps(one, slo) for one in runs)

        return bisected(kept, bracketed(kept, HALF), RATE_PRECISION).low


def advise(search: Search, interrupt: Interrupt) -> Advice | None:
    """Finds the advice, None if no candidate can be simulated or after Ctrl-C."""
    question = search.question
    if not search.states:
        return None
    found = closest(search, interrupt)
    if found is None:
        return None
    best, probe, runs = found
    worst = min(runs, key=lambda run: run.share)
    limits_s = question.slo.limits_s
    rates = [RateTask(name=best.candidate.name, probe=replace(probe, stop=True))]
    load = 0.0
    misses_idle = best.ceiling is not None and best.ceiling.share < question.slo.attainment_target
    if not misses_idle:
        load = next((found for _, found in in_turn(RateTask.run, rates, 1, interrupt)), 0.0)
    return Advice(
        best=best.candidate.name,
        replicas=probe.replicas,
        share=worst.share,
        terms={
            term: (limit_s, worst.term_limits_s[term])
            for term, limit_s in limits_s.items()
            if worst.term_limits_s[term] > limit_s
        },
        looser={
            term: max(run.loosened_s[term] for run in runs)
            for term in limits_s
            if all(math.isfinite(run.loosened_s[term]) for run in runs)
        },
        load=load or None,
        misses_idle=misses_idle,
        rate_per_s=_rate_per_s(runs, probe),
        other=_other_gpu(best.candidate, search, interrupt),
    )


def closest(search: Search, interrupt: Interrupt) -> tuple[State, Probe, list[Run]] | None:
    """Finds the candidate with the largest share within the SLO, with as many replicas as allowed.

    Of candidates that fail, only bounds and runs that were ended early are known, and neither gives the
    share. The most promising ones are therefore simulated to the end. Returns None after Ctrl-C.
    """
    tried = [state for simulated in (True, False) for state in _promising(search.states, simulated)]
    probes = [
        replace(search.probe(state, max(state.bracket.most, state.candidate.least_up)), stop=False)
        for state in tried
    ]
    launcher = search.question.settings.runs_on
    runs = dict(in_turn(Probe.run, probes, launcher, interrupt))
    if not runs:
        return None

    def share(index: int) -> tuple[float, float]:
        return min(run.share for run in runs[index]), -tried[index].candidate.usd_per_hour

    best = max(sorted(runs), key=share)
    return tried[best], probes[best], runs[best]


def _promising(states: Sequence[State], simulated: bool) -> list[State]:
    """Returns the candidates with the largest possible share within the SLO."""

    def at_most(state: State) -> float:
        shares = [min(run.share for run in found) for found in state.runs.values()]
        ceiling = 1.0 if state.ceiling is None else state.ceiling.share
        return min(ceiling, max(shares, default=ceiling))

    of_these = [state for state in states if bool(state.runs) is simulated]
    return sorted(of_these, key=lambda s: (-at_most(s), s.candidate.usd_per_hour, s.index))[:NUM_CLOSE]


def _rate_per_s(runs: Sequence[Run], probe: Probe) -> float:
    return sum(run.rate_per_s for run in runs) / len(runs)


def _other_gpu(best: Candidate, search: Search, interrupt: Interrupt) -> tuple[str, int, float] | None:
    """Finds the cheapest fleet of a GPU outside the search, with all other settings of the best candidate."""
    question = search.question
    asked = {one.scenario.hardware.name for one in question.candidates}
    choices = [choice.name for choice in find_groups(question.source.dirs)["hardware"]]
    settings = replace(
        question.settings,
        hardware=tuple(choices),
        tensor_parallel_sizes=(),
        pipeline_parallel_sizes=(),
        engines=(),
        quantisations=(),
        more=(),
        top=1,
    )
    own = [override for override in best.overrides if Override.parse(override).name != "hardware"]
    found, _ = build_candidates(settings, Variants(question.source, [*question.base, *own]))
    others = tuple(one for one in found if one.scenario.hardware.name not in asked)
    if not others or interrupt.noted:
        return None
    asked_again = Question(
        settings=settings,
        slo=question.slo,
        candidates=others,
        refused=(),
        base=question.base,
        source=question.source,
    )
    again = begin(asked_again, search.load, search.seeds)
    again.exhaust(interrupt, lambda done, total: None)
    ranked = again.ranked()
    if not ranked:
        return None
    labels = " ".join(label for axis, label in best.parts.items() if axis != "hardware")
    name = f"{ranked[0].candidate.name} {labels}".strip()
    return name, again.replicas(ranked[0]), again.least_cost(ranked[0])


def advice_lines(found: Advice, slo: Slo, growth: str = "") -> list[str]:
    """Returns sentences on the missed limits and the changes that would help.

    growth: text on the month and the growth of its traffic; empty without growth.
    """
    target = f"{100 * slo.attainment_target:g} %"
    lines = [
        f"No candidate meets the SLO{growth}. The closest is {found.best} with {found.replicas:,} "
        f"replica{'s' * (found.replicas != 1)}: "
        f"SLO attainment {100 * found.share:.3g} %, target {target}."
    ]
    for term, (limit_s, needed_s) in found.terms.items():
        lines.append(
            f"{LATENCIES[term]}: {target} of the requests are within {_ms(needed_s)}, "
            f"{needed_s / limit_s:.2f} times the limit of {_ms(limit_s)}."
            if math.isfinite(needed_s)
            else f"{LATENCIES[term]}: exists for fewer than {target} of the requests."
        )
    for term, limit_s in found.looser.items():
        lines.append(f"A looser limit: slo.{term}_ms={math.ceil(1e3 * limit_s)} would be met.")
    if not found.looser:
        lines.append("A looser limit: relaxing one limit alone is not enough.")
    if found.misses_idle:
        lines.append("A lower rate: does not help, as the limit is missed even on idle replicas.")
    elif found.load is None:
        lines.append(
            f"A lower rate: none down to {number(LEAST_LOAD * found.rate_per_s)} requests/s "
            f"({LEAST_LOAD:.2g} times the traffic) meets the SLO; lower rates were not tried."
        )
    else:
        lines.append(
            f"A lower rate: it meets the SLO at {number(found.load * found.rate_per_s)} requests/s "
            f"({found.load:.2f} times the traffic of {number(found.rate_per_s)} requests/s)."
        )
    if found.other is None:
        lines.append("Another GPU: no GPU of configs/hardware meets the SLO with these settings.")
    else:
        name, replicas, usd = found.other
        lines.append(
            f"Another GPU: {replicas:,} x {name} meet{'s' * (replicas == 1)} the SLO for ${usd:,.2f}/hour."
        )
    return lines


def to_json(found: Advice) -> dict[str, Any]:
    """Returns the advice as plain values."""
    return {
        "best": found.best,
        "replicas": found.replicas,
        "share": found.share,
        "missed_terms": {
            term: {"limit_s": limit_s, "needed_s": plain_json(needed_s)}
            for term, (limit_s, needed_s) in found.terms.items()
        },
        "looser_limits_s": dict(found.looser),
        "kept_load": found.load,
        "missed_on_idle_replicas": found.misses_idle,
        "rate_per_s": found.rate_per_s,
        "other_gpu": None
        if found.other is None
        else dict(zip(("candidate", "replicas", "usd_per_hour"), found.other, strict=True)),
    }


def _ms(seconds: float) -> str:
    return f"{number(1e3 * seconds)} ms"
