"""Checks that a fresh EngineCore reproduces the decisions of a recorded engine.

The core gets the recorded events at the same times and in the same order; every plan must then have the
digest of the recorded plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from experiments.validate.engine.acceptances import with_acceptances
from experiments.validate.engine.recording import Event, Recording, Step, in_words
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, StepPlan
from policies.core.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Difference:
    """The first plan that differs. recorded, replayed: descriptions of the plans. state: of the core."""

    step: int
    now_s: float
    recorded: str
    replayed: str
    state: str


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Number of equally decided steps, and the first difference."""

    num_equal: int
    num_steps: int
    difference: Difference | None


def replay(recording: Recording, core: EngineCore) -> Equivalence:
    """Replays a recording on a core that is in the state of the engine's core at the start."""
    before = {step: list(events) for step, events in groupby(recording.events, key=lambda event: event.step)}
    num_steps = len(recording.steps)
    for row in map(Step._make, recording.steps.itertuples(index=False, name=None)):
        events = before.get(row.step, [])
        _apply(core, events)
        plan = core.plan(row.start_s)
        _load(core)
        found = "no plan" if plan is None else plan.digest()
        if plan is None or found != row.digest:
            difference = Difference(
                row.step, row.start_s, _recorded(row), _replayed(plan), _state(core, events)
            )
            return Equivalence(row.step, num_steps, difference)
        core.commit(plan, _outcome(core, plan, row.num_iterations, events), row.end_s)
    return Equivalence(num_steps, num_steps, None)


def _apply(core: EngineCore, events: Iterable[Event]) -> None:
    """Passes the core the events between two steps."""
    for event in events:
        if event.kind == "enter":
            core.add(event.value)
        elif event.kind == "leave":
            core.abort(event.request_id, FinishReason[event.value])
        elif event.kind == "wait":
            core.plan(event.now_s)
            _load(core)


def _load(core: EngineCore) -> None:
    """Completes KV and adapter transfers at once; the device keeps their order."""
    for transfer in core.take_transfers():
        if transfer.seq is not None:
            core.loaded(transfer.seq.request_id)
    for load in core.take_adapter_loads():
        core.adapter_loaded(load.name)


def _outcome(core: EngineCore, plan: StepPlan, num_iterations: int, events: Iterable[Event]) -> StepOutcome:
    """Returns the outcome that the engine gave its core with the commit."""
    events = list(events)
    ended = [core.find(event.request_id) for event in events if event.kind == "end"]
    parents = {event.request_id: event.value for event in events if event.kind == "parents"}
    outcome = StepOutcome(num_iterations, tuple(seq for seq in ended if seq is not None), parents)
    return outcome if plan.drafts is None else with_acceptances(outcome, plan, events)


def _recorded(row: Step) -> str:
    return f"{row.plan}, digest {row.digest}"


def _replayed(plan: StepPlan | None) -> str:
    if plan is None:
        return "no plan"
    return f"{in_words(plan)}, digest {plan.digest()}"


def _state(core: EngineCore, events: Iterable[Event]) -> str:
    events_text = "; ".join(f"{event.kind} {event.request_id}" for event in events) or "nothing"
    running = ", ".join(map(repr, core.running.values()))
    return (
        f"events before: {events_text}. Running: {running}. {core.num_waiting} waiting, "
        f"{core.block_pool.num_free} of {core.block_pool.num_blocks} blocks free"
    )
