"""Finds the cheapest candidate with the checkpoint's own number formats, if the winner has others.

Other formats change the outputs of the model; their quality is not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.app.settings.override import Override
from experiments.app.settings.variants import Variants
from experiments.capacity.candidates import Candidate, Question
from experiments.capacity.search import Search, State
from hwmodels.model import ModelSpec
from hwmodels.model.weights import Role
from sim.engine.clock import Interrupt
from sim.settings.build import build

FORMATS = ("weights", "moe_weights", "kv_cache_dtype")
"""Settings of a model with its number formats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unchanged:
    """Cheapest fleet that keeps the checkpoint's number formats."""

    changed: tuple[str, ...]
    """Formats of the winner that differ, such as fp8 weights."""
    own: str
    """Weight format of the checkpoint, such as bf16."""
    candidates: int
    """Number of candidates with the checkpoint's formats."""
    best: tuple[str, int, float] | None
    """Candidate, its replicas and USD per hour; None if none is known to meet the SLO."""
    is_searched: bool
    """True if the search for it was complete."""


class Checkpoints:
    """Models with the number formats of their checkpoints."""

    def __init__(self, question: Question) -> None:
        self._variants = Variants(question.source, _without_formats(question.base))
        self._models: dict[tuple[str, ...], ModelSpec] = {}

    def of(self, candidate: Candidate) -> ModelSpec:
        """Returns the candidate's model without the number formats that were set for it."""
        own = tuple(
            text for text in _without_formats(candidate.overrides) if Override.parse(text).root == "model"
        )
        if own not in self._models:
            self._models[own] = build(self._variants.config(own)["model"], "model", ModelSpec)
        return self._models[own]

    def changed(self, candidate: Candidate) -> tuple[str, ...]:
        """Returns the number formats of a candidate that differ from those of its checkpoint."""
        model, own = candidate.scenario.model, self.of(candidate)
        found = []
        for role, what in ((Role.dense, "weights"), (Role.routed, "weights of experts")):
            given = model.weight_format_of(role)
            if (role is Role.dense or model.has_experts) and given != own.weight_format_of(role):
                found.append(f"{given} {what}")
        if model.kv_dtype != own.kv_dtype:
            found.append(f"{model.kv_dtype} KV cache")
        return tuple(found)


def _without_formats(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides that set no number format of the model."""
    names = {f"model.{key}" for key in FORMATS}
    return [text for text in overrides if Override.parse(text).name not in names]


def cheapest_unchanged(search: Search, interrupt: Interrupt) -> Unchanged | None:
    """Finds it, with further runs if needed; None if the winner keeps the formats or there is none."""
    ranked = search.ranked()
    if not ranked:
        return None
    winner, checkpoints = ranked[0].candidate, Checkpoints(search.question)
    changed = checkpoints.changed(winner)
    if not changed:
        return None
    keeping = [s for s in search.states if not checkpoints.changed(s.candidate)]
    best = next((state for state in ranked if state in keeping), None)
    settings = search.question.settings
    is_searched = settings.search == "exhaustive" and not interrupt.noted
    if best is None and is_searched:
        best = _searched(search, keeping, interrupt)
        is_searched = not interrupt.noted
    return Unchanged(
        changed=changed,
        own=checkpoints.of(winner).weight_format_of(Role.dense),
        candidates=len(keeping),
        best=None if best is None else (best.candidate.name, search.replicas(best), search.least_cost(best)),
        is_searched=is_searched,
    )


def _searched(search: Search, states: Sequence[State], interrupt: Interrupt) -> State | None:
    """Continues the search among some of its candidates until the cheapest of them is known."""
    question = replace(search.question, settings=replace(search.question.settings, top=1))
    copies = [replace(s, bracket=replace(s.bracket), runs={**s.runs}, trying={}) for s in states]
    again = replace(search, question=question, states=copies)
    again.exhaust(interrupt, lambda done, total: None)
    return next(iter(again.ranked()), None)


def precision_sentence(found: Unchanged, winner_usd_per_hour: float) -> str:
    """Returns a sentence on the changed formats and the cheapest fleet with those of the checkpoint."""
    own = f"the checkpoint's {found.own}"
    text = f"{' and '.join(found.changed)} change the model's outputs, so check their quality; "
    if found.best is not None:
        name, replicas, usd = found.best
        more = usd / winner_usd_per_hour - 1 if winner_usd_per_hour > 0 else 0.0
        extra = f"{100 * more:.3g} % more" if more > 1e-9 else "the same cost"
        return f"{text}cheapest with {own}: {replicas} x {name} for ${usd:,.2f}/hour, {extra}."
    if not found.candidates:
        return f"{text}no candidate has {own}; to compare, add null to capacity.quantisations."
    if not found.is_searched:
        return f"{text}the search for the cheapest candidate with {own} was not complete."
    return f"{text}no candidate with {own} meets the SLO."
