"""Compares recordings of our own engine with a simulated run: decisions, errors, and parts of the error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.app.job import UnsuccessfulError
from experiments.validate.engine.acceptances import as_measured
from experiments.validate.engine.decomposition import Decomposition, decompose
from experiments.validate.engine.from_recording import measured
from experiments.validate.engine.noise import WHAT_TO_DO, refusal_of
from experiments.validate.engine.recording import Recording
from experiments.validate.engine.replay import Equivalence, replay
from experiments.validate.fidelity.errors import Fidelity, fidelity_of
from experiments.validate.fidelity.measured import of_records
from experiments.validate.fidelity.metrics import scaled
from experiments.validate.fidelity.printed import print_fidelity
from experiments.validate.fidelity.report import write_validation
from experiments.validate.fidelity.settings import ValidateSettings
from experiments.validate.foreign.run import write_tables
from sim.metrics.result import RunResult
from sim.report.wording import plural
from sim.settings.build import policy_errors
from sim.settings.scenario import run
from sim.setup.scenario import Scenario
from sim.workload.base import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of a comparison. equivalences: per recording. decomposition: None if impossible, see notes."""

    result: RunResult
    fidelity: Fidelity
    equivalences: tuple[Equivalence, ...]
    decomposition: Decomposition | None
    notes: tuple[str, ...]

    @property
    def num_equal(self) -> int:
        return sum(one.num_equal for one in self.equivalences)

    @property
    def num_steps(self) -> int:
        return sum(one.num_steps for one in self.equivalences)

    @property
    def is_equal(self) -> bool:
        """True if every plan was reproduced, also in the simulator."""
        decomposed = self.decomposition
        return self.num_equal == self.num_steps and (
            decomposed is None or decomposed.num_equal == decomposed.num_steps
        )

    @property
    def share_equal(self) -> float:
        """Share of equal plans: the smaller one of replay and simulator."""
        counts = [(self.num_equal, self.num_steps)]
        if self.decomposition is not None:
            counts.append((self.decomposition.num_equal, self.decomposition.num_steps))
        return min(equal / steps if steps else 1.0 for equal, steps in counts)

    @property
    def decisions(self) -> str:
        """Sentence on the decisions, with the circumstances of the first difference."""
        text = f"{self.num_equal:,} of {self.num_steps:,} plans of the engine were reproduced"
        if self.decomposition is not None:
            equal, steps = self.decomposition.num_equal, self.decomposition.num_steps
            text += f", {equal:,} of {steps:,} in the simulator with the recorded times"
        found = [one.difference for one in self.equivalences if one.difference is not None]
        if not found:
            return f"{text}."
        first = found[0]
        return (
            f"{text}. First difference at step {first.step}, {first.now_s:.6f} s: recorded {first.recorded}; "
            f"replayed {first.replayed}. {first.state}."
        )

    def print(self, console: Console) -> None:
        """Prints the verdict on the terminal."""
        colour = "bold green" if self.is_equal else "bold red"
        console.print(self.decisions, style=colour, highlight=False, soft_wrap=True)
        parts = () if self.decomposition is None else self.decomposition.parts
        print_fidelity(self.fidelity, self.notes, console, parts)


def judge(
    settings: ValidateSettings, scenario: Scenario, recordings: Sequence[Recording], source: Source
) -> Verdict:
    """Compares recordings with a scenario of equal KV blocks. source: requests of the simulated run."""
    num_blocks = scenario.plan_memory().num_blocks
    scenario = as_measured(scenario, recordings)
    with policy_errors(scenario):
        cores = (scenario.core(num_blocks, tpot_s=scenario.tpot_s) for _ in recordings)
        equivalences = tuple(replay(one, core) for one, core in zip(recordings, cores, strict=True))
    result = run(scenario, source)
    notes = list(result.summary["notes"])
    fidelity = fidelity_of(
        result,
        [measured(one, f"run {i}") for i, one in enumerate(recordings)],
        trim=scenario.metrics,
        thresholds=settings.thresholds,
        slos=scaled(scenario.slo, settings.slo_scales),
        refusal=refusal_of(recordings),
    )
    decomposition = None
    try:
        decomposition = decompose(recordings, scenario, of_records(result.records))
    except ValueError as error:
        notes.append(f"The error has no decomposition: {error}.")
    if len(recordings) == 1:
        notes.append("A single run has no noise floor; use repeats=2, or several recordings in against=.")
    return Verdict(
        result=result,
        fidelity=fidelity,
        equivalences=equivalences,
        decomposition=decomposition,
        notes=tuple(notes),
    )


def check_success(verdicts: Sequence[Verdict]) -> None:
    """Raises UnsuccessfulError if plans differ, or if the machine was too noisy for a verdict."""
    if not all(verdict.is_equal for verdict in verdicts):
        raise UnsuccessfulError
    num_refused = sum(bool(verdict.fidelity.refusal) for verdict in verdicts)
    if num_refused:
        where = f" on {num_refused} of {plural(len(verdicts), 'case')}" if len(verdicts) > 1 else ""
        raise UnsuccessfulError(f"no verdict{where}: the machine was too noisy; {WHAT_TO_DO}")


def write_verdict(
    folder: Path,
    verdict: Verdict,
    *,
    title: str,
    config: dict[str, Any],
    recordings: Sequence[Recording],
    page: bool,
    tables: bool,
) -> list[Path]:
    """Writes validation.json, report.html and tables; returns the paths of the first two."""
    parts = () if verdict.decomposition is None else verdict.decomposition.parts
    written = write_validation(
        folder,
        verdict.fidelity,
        title=title,
        config=config,
        notes=verdict.notes,
        parts=parts,
        equivalence=verdict.decisions,
        measured_environment=recordings[0].engine.get("environment"),
        page=page,
    )
    if tables:
        write_tables(folder, verdict.result, verdict.fidelity.reals)
    return written
