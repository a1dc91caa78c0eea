"""Search of large spaces: Optuna (NSGA-II) proposes candidates, whose replicas are then searched as usual.

The objectives are USD per hour (lower is better) and output tokens/s per user (higher is better). A candidate
that a bound rules out, or that needs too many replicas, is reported to Optuna as failed. Candidates that were
not proposed are not ranked, so that a better one may be missed. With capacity.study the trials and their runs
are kept in a file; the next search with the same settings resumes from it and does not repeat the runs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.app.settings.hydra_errors import composed
from experiments.capacity.candidates import Question
from experiments.capacity.probe import Probe, Run, keeps
from experiments.capacity.search import Bracket, Search, State
from experiments.study.settings import OF_A_STUDY
from experiments.study.steady_state import Lack
from experiments.study.workers import Report, in_turn
from sim.engine.clock import Interrupt
from sim.metrics.confidence import Interval
from sim.settings.errors import NOT_OF_A_SCENARIO, ConfigError

MAX_ASKED = 20
"""Most proposals per simulated trial; known and impossible candidates are answered without a simulation."""
NOT_ASKED = ("search", "trials", "study", "top", "months", "growth_per_month", *OF_A_STUDY)
"""Settings that do not change the result of a trial; each load has its own trials."""
QUESTION, RUNS = "question", "runs"
"""Names of user attributes: of a study, and of a trial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settle:
    """Task that finds the replicas of one candidate."""

    name: str
    probe: Probe
    fails: int
    most: int

    def run(self) -> list[tuple[int, list[Run]]]:
        """Returns (replicas, runs) of every number tried, in order."""
        from_here = Bracket(fails=self.fails, most=self.most)
        found = []
        while (number := from_here.next()) is not None:
            runs = replace(self.probe, replicas=number).run()
            kept = len(runs) == len(self.probe.seeds) and all(
                keeps(one, self.probe.scenario.slo) for one in runs
            )
            from_here.learn(number, kept)
            found.append((number, runs))
        return found


def propose(search: Search, interrupt: Interrupt, report: Report) -> None:
    """Simulates capacity.trials candidates. Raises ConfigError without optuna, and for an unusable study."""
    settings = search.question.settings
    optuna = load_optuna()
    digest = "" if settings.study is None else digest_of(search.question)
    study = _study(optuna, settings.study, settings.seeds[0], search.load, digest)
    search.bound_all(interrupt)
    axes = {axis: [entry.label for entry in entries] for axis, entries in settings.axes.items()}
    by_parts = {tuple(state.candidate.parts.values()): state for state in search.states}
    asked: list[tuple[Any, State]] = []
    waiting: dict[str, list[Any]] = {}
    num_trials, num_asked = 0, 0
    _recall(study, search, axes, by_parts)

    def tell(trial: Any, state: State) -> None:
        values = _values(search, state)
        if values is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, values)

    def tasks() -> Iterator[Settle | None]:
        nonlocal num_trials, num_asked
        while num_trials < settings.trials and num_asked < MAX_ASKED * settings.trials:
            if all(state.is_settled or state.is_running for state in search.states):
                yield None
                continue
            num_asked += 1
            trial = study.ask()
            parts = tuple(trial.suggest_categorical(axis, labels) for axis, labels in axes.items())
            state = by_parts.get(parts)
            if state is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            elif state.is_settled:
                tell(trial, state)
            elif state.is_running:
                waiting.setdefault(state.candidate.name, []).append(trial)
            else:
                num_trials += 1
                state.is_running = True
                asked.append((trial, state))
                yield Settle(
                    name=state.candidate.name,
                    probe=search.probe(state, 1),
                    fails=state.bracket.fails,
                    most=state.bracket.most,
                )

    outcomes = in_turn(Settle.run, tasks(), settings.runs_on, interrupt)
    for done, (index, found) in enumerate(outcomes, 1):
        trial, state = asked[index]
        state.is_running = False
        for number, runs in found:
            state.learn(number, runs, len(search.seeds), search.question)
        trial.set_user_attr(RUNS, [(number, [_kept(one) for one in runs]) for number, runs in found])
        for each in [trial, *waiting.pop(state.candidate.name, [])]:
            tell(each, state)
        report(done, settings.trials)
    search.interrupted = interrupt.noted


def _recall(
    study: Any, search: Search, axes: Iterable[str], by_parts: Mapping[tuple[str, ...], State]
) -> None:
    """Restores the results of earlier trials of the study."""
    for trial in study.get_trials(deepcopy=False):
        known = by_parts.get(tuple(trial.params.get(axis) for axis in axes))
        if known is not None and not known.runs:
            for number, runs in trial.user_attrs.get(RUNS, ()):
                known.learn(number, [_run_of(one) for one in runs], len(search.seeds), search.question)


def load_optuna() -> Any:
    """Imports optuna with its log messages off. Raises ConfigError if it is not installed."""
    try:
        optuna = importlib.import_module("optuna")
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ConfigError(
            "capacity.search=optuna: optuna is not installed; pip install 'windtunnel[optuna]', or choose "
            "capacity.search=exhaustive"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def digest_of(question: Question) -> str:
    """Returns a digest of everything that the result of a trial depends on.

    That is the scenario, the candidates, the margins and the seeds.
    """
    cfg = OmegaConf.to_container(composed(question.source, question.base), resolve=False)
    assert isinstance(cfg, dict)
    scenario = {str(key): value for key, value in cfg.items() if key not in NOT_OF_A_SCENARIO}
    asked = {key: value for key, value in asdict(question.settings).items() if key not in NOT_ASKED}
    text = json.dumps([scenario, asked], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _kept(run: Run) -> dict[str, Any]:
    """Returns a run as JSON values; see `_run_of`."""
    return run._asdict() | {"intervals": dict(run.intervals)}


def _run_of(kept: dict[str, Any]) -> Run:
    intervals = {name: Interval(*bounds) for name, bounds in kept["intervals"].items()}
    batch, notes = tuple(kept["batch"]), tuple(kept["notes"])
    lack = None if kept["lack"] is None else Lack(*kept["lack"])
    return Run(**kept | {"batch": batch, "notes": notes, "intervals": intervals, "lack": lack})


def _study(optuna: Any, file: str | None, seed: int, load: float = 1.0, digest: str = "") -> Any:
    """Opens the study in the file, or creates one.

    Raises ConfigError if the file is not a study, or belongs to a search with other settings.
    """
    storage = None
    if file is not None:
        path = Path(file).expanduser()
        if not path.parent.is_dir():
            raise ConfigError(
                f"capacity.study={file}: there is no folder {path.parent}; create it, or choose another file"
            )
        journal = importlib.import_module("optuna.storages.journal")
        storage = optuna.storages.JournalStorage(journal.JournalFileBackend(str(path)))
    try:
        others = [] if storage is None else optuna.get_all_study_summaries(storage)
        if any(other.user_attrs.get(QUESTION) != digest for other in others):
            raise ConfigError(
                f"capacity.study={file}: belongs to a search with other overrides, candidates, margins or "
                "seeds; choose another file"
            )
        study = optuna.create_study(
            study_name=f"windtunnel capacity, load {load:g}",
            storage=storage,
            load_if_exists=True,
            directions=["minimize", "maximize"],
        )
        if study.user_attrs.get(QUESTION) is None:
            study.set_user_attr(QUESTION, digest)
        # Each call needs another seed, or the same candidates would be proposed again.
        study.sampler = optuna.samplers.NSGAIISampler(seed=seed + len(study.trials), population_size=16)
        return study
    except (ValueError, KeyError, OSError, optuna.exceptions.OptunaError) as error:
        raise ConfigError(
            f"capacity.study={file}: cannot be resumed ({error}); choose another file"
        ) from error


def _values(search: Search, state: State) -> tuple[float, float] | None:
    """Returns the objectives of a candidate, None if it does not meet the SLO or generates no tokens."""
    if state.num_up is None:
        return None
    runs: Sequence[Run] = state.runs[state.num_up]
    tpot_s = sum(run.figures["tpot_p50_s"] for run in runs) / len(runs)
    return (search.least_cost(state), 1 / tpot_s) if tpot_s > 0 and math.isfinite(tpot_s) else None
