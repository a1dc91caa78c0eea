"""Draft tokens in a recording: replayed as they were accepted, and counted for the free simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from experiments.validate.engine.recording import Event, Recording
from policies.core.plan import StepOutcome, StepPlan
from policies.core.request import Request
from policies.speculation import Proposer, num_places
from policies.speculation.engine.drafts import DraftPlan, Shapes
from sim.report.files import write_whole
from sim.setup.scenario import Scenario
from sim.speculation import Verdicts
from sim.speculation.acceptance.table import COLUMNS, TaskCounts, table_verdicts
from sim.speculation.passes import Passes

TASK = "recorded"
"""Name of the task of all recorded requests, as a table of acceptance has tasks."""


def with_acceptances(outcome: StepOutcome, plan: StepPlan, events: Iterable[Event]) -> StepOutcome:
    """Returns an outcome with the recorded acceptances, as far as the plan has the recorded drafts."""
    drafts = plan.drafts
    assert isinstance(drafts, DraftPlan)
    passes = {event.request_id: event.value[2:] for event in events if event.kind == "pass"}
    found = {event.request_id: event.value for event in events if event.kind == "drafted"}
    none = [0] * outcome.iterations
    accepted = np.array([passes.get(seq.request_id, none) for seq in drafts.seqs], np.int64)
    proposed = None
    if found:
        proposed = np.array([found.get(seq.request_id, 0) for seq in drafts.next_seqs], np.int64)
    return outcome._replace(
        accepted=accepted.reshape(len(drafts.seqs), outcome.iterations).T, proposed=proposed
    )


class RecordedAcceptance:
    """Accepts what was accepted in a recording; an acceptance model of the simulator."""

    def __init__(self, recording: Recording) -> None:
        self._passes: dict[int, list[tuple[int, int]]] = {}  # by request: (output tokens, accepted ones)
        self._found: dict[int, list[tuple[int, int]]] = {}  # by request: (output tokens, draft tokens found)
        pending: dict[int, int] = {}  # by request: draft tokens that were found for its next pass
        for event in recording.events:
            if event.kind == "pass":
                position, _, *accepted = event.value
                if event.request_id in pending:
                    found = position, pending.pop(event.request_id)
                    self._found.setdefault(event.request_id, []).append(found)
                for num_accepted in accepted:
                    self._passes.setdefault(event.request_id, []).append((position, num_accepted))
                    position += num_accepted + 1
            elif event.kind == "drafted":
                pending[event.request_id] = event.value
        self._varies = any(event.kind == "drafted" for event in recording.events)

    def check(self, proposer: Proposer) -> None:
        """Accepts every proposer: the recording has its acceptances."""

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns the recorded verdicts of a request; where no pass began, nothing is accepted."""
        accepted = _filled(self._passes.get(request.request_id, ()), num_positions)
        if not self._varies:
            return Verdicts(accepted)
        return Verdicts(accepted, _filled(self._found.get(request.request_id, ()), num_positions))


def replaying(scenario: Scenario, recording: Recording) -> Callable[..., Passes] | None:
    """Returns what makes passes that accept what was recorded; None: the scenario does not speculate."""
    if scenario.speculation is None:
        return None
    acceptance = RecordedAcceptance(recording)
    return partial(Passes, acceptance, scenario.speculation)


def as_measured(scenario: Scenario, recordings: Sequence[Recording]) -> Scenario:
    """Returns a scenario that draws acceptances with the shares of recorded runs, by request and place."""
    if scenario.speculation is None:
        return scenario
    return replace(scenario, acceptance=SharesByRequest(recordings, scenario.speculation))


class SharesByRequest:
    """Accepts draft tokens with the shares of their request in recorded runs, by place.

    Texts differ in how well they are guessed, so that one share for all would make long and short answers
    alike. Requests without a pass have the shares of all others.
    """

    def __init__(self, recordings: Sequence[Recording], proposer: Proposer) -> None:
        counts: dict[int, _Counts] = {}
        self._all = _Counts(proposer)
        for recording in recordings:
            for event in recording.events:
                if event.kind == "pass":
                    own = counts.setdefault(event.request_id, _Counts(proposer))
                    for each in (own, self._all):
                        each.add(event.value)
        self._counts = counts

    def check(self, proposer: Proposer) -> None:
        """Accepts every proposer: the recordings have its acceptances."""

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns the verdicts on drafts that begin at output positions 0 to num_positions - 1."""
        counts = self._counts.get(request.request_id, self._all).task_counts()
        rates = np.array(counts.rates()), np.array(counts.drafted_shares())
        return table_verdicts(*rates, 0.0, request, seed, num_positions, proposer)


class _Counts:
    """Passes, and by place those that drafted and accepted a token there."""

    def __init__(self, proposer: Proposer) -> None:
        self._depth_of = Shapes(proposer).depth
        self.passes = 0
        self.drafted = np.zeros(num_places(proposer), np.int64)
        self.accepted = np.zeros(num_places(proposer), np.int64)

    def add(self, value: Sequence[int]) -> None:
        """Counts the value of an event `pass`."""
        _, num_drafts, *accepted = value
        self.passes += len(accepted)
        self.drafted[: self._depth_of[num_drafts]] += len(accepted)
        for num_accepted in accepted:
            self.accepted[:num_accepted] += 1

    def task_counts(self) -> TaskCounts:
        """Returns the counts as those of a table of acceptance."""
        return TaskCounts(max(self.passes, 1), self.drafted.tolist(), self.accepted.tolist())


def check_written(file: str | None, scenarios: Sequence[Scenario]) -> None:
    """Raises ValueError if the acceptance of these scenarios cannot be written to one file."""
    if file is None:
        return
    if len(scenarios) > 1:
        raise ValueError(
            f"write_acceptance={file}: is for one run, and the suite has {len(scenarios)} cases; "
            "choose suite=single"
        )
    if scenarios[0].speculation is None:
        raise ValueError(
            f"write_acceptance={file}: nothing is drafted; choose a speculation=, or set it to null"
        )
    if not Path(file).expanduser().parent.is_dir():
        raise ValueError(f"write_acceptance={file}: its folder does not exist; create it first")


def write_measured(file: str, recordings: Sequence[Recording], scenario: Scenario) -> None:
    """Writes the acceptance of recorded runs of a scenario."""
    assert scenario.speculation is not None
    write_acceptance(Path(file).expanduser(), recordings, scenario.speculation)


def _filled(pairs: Iterable[tuple[int, int]], num_positions: int) -> np.ndarray:
    values = np.zeros(num_positions, np.uint8)
    for position, value in pairs:
        if position < num_positions:
            values[position] = value
    return values


def write_acceptance(path: Path, recordings: Sequence[Recording], proposer: Proposer) -> None:
    """Writes the acceptance of recorded runs by place, as `acceptance=table` reads it.

    Raises ValueError if no draft token was verified.
    """
    counts = _Counts(proposer)
    for recording in recordings:
        for event in recording.events:
            if event.kind == "pass":
                counts.add(event.value)
    if not counts.drafted[0]:
        raise ValueError("no draft token was verified, so there is no acceptance to write")
    by_place = zip(counts.drafted.tolist(), counts.accepted.tolist(), strict=True)
    rows = [
        f"{TASK},{place},{counts.passes},{drafted},{accepted}"
        for place, (drafted, accepted) in enumerate(by_place, 1)
    ]
    write_whole(path, "\n".join([",".join(COLUMNS), *rows]) + "\n")
