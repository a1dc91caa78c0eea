"""Finds the cheapest candidate with the checkpoint's own number formats, if the winner has others.

Other formats change the outputs of the model; their quality is not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.capacity.search import Search, State
from hwmodels.model.matrices import Role
from hwmodels.model.model_spec import ModelSpec
from sim.engine.interrupt import Interrupt


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


def changed_formats(model: ModelSpec) -> tuple[str, ...]:
    """Returns the number formats of a model that differ from those of its checkpoint."""
    own = as_checkpoint(model)
    found = []
    for role, what in ((Role.dense, "weights"), (Role.routed, "weights of experts")):
        given = model.weight_format_of(role)
        if (role is Role.dense or model.has_experts) and given != own.weight_format_of(role):
            found.append(f"{given} {what}")
    if model.kv_dtype != own.kv_dtype:
        found.append(f"{model.kv_dtype} KV cache")
    return tuple(found)


def as_checkpoint(model: ModelSpec) -> ModelSpec:
    """Returns the model with the number formats of its checkpoint."""
    return replace(model, weights=None, moe_weights=None, kv_cache_dtype="auto")


def cheapest_unchanged(search: Search, interrupt: Interrupt) -> Unchanged | None:
    """Finds it, with further runs if needed; None if the winner keeps the formats or there is none."""
    ranked = search.ranked()
    if not ranked:
        return None
    model = ranked[0].candidate.scenario.model
    changed = changed_formats(model)
    if not changed:
        return None
    keeping = [s for s in search.states if not changed_formats(s.candidate.scenario.model)]
    best = next((state for state in ranked if state in keeping), None)
    settings = search.question.settings
    is_searched = settings.search == "exhaustive" and not interrupt.noted
    if best is None and is_searched:
        best = _searched(search, keeping, interrupt)
        is_searched = not interrupt.noted
    return Unchanged(
        changed=changed,
        own=as_checkpoint(model).weight_format_of(Role.dense),
        candidates=len(keeping),
        best=None if best is None else _fleet(search, best),
        is_searched=is_searched,
    )


def _searched(search: Search, states: Sequence[State], interrupt: Interrupt) -> State | None:
    """Continues the search among some of its candidates until the cheapest of them is known."""
    question = replace(search.question, settings=replace(search.question.settings, top=1))
    copies = [replace(s, bracket=replace(s.bracket), runs={**s.runs}, trying={}) for s in states]
    again = replace(search, question=question, states=copies)
    again.exhaust(interrupt, lambda done, total: None)
    return next(iter(again.ranked()), None)


def _fleet(search: Search, state: State) -> tuple[str, int, float]:
    assert state.num_up is not None
    replicas = state.candidate.deployed(state.num_up, search.question.settings)
    return state.candidate.name, replicas, search.least_cost(state)


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
