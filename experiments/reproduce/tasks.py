"""Does the work of the gallery: runs of shipped comparisons and functions that simulate, each once."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.app.run_folder import file_errors_reported
from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.hydra_errors import composed
from experiments.compare.arms import points
from experiments.compare.settings import CompareSettings, Experiment, build_settings
from experiments.reproduce.rows import Compared, Direct, Row, Sampled, Searched
from experiments.study.code import code_version
from experiments.study.figures import as_text, figures
from experiments.study.runs import Point
from experiments.study.workers import Report, in_turn, simulate_config
from sim.engine.clock import ctrl_c_noted
from sim.metrics.confidence import Interval, compare_paired, mean_interval
from sim.report.files import write_whole
from sim.settings.errors import ConfigError, suggest
from sim.settings.recorded import read_json_object

OWN_CODE = ("reproduce", "papers")
"""Folders of `experiments` that the functions of rows and their arguments are in."""
CURE = "choose another folder with cache=, or cache=null"
VALUE = "value"
NAN = math.nan


class Work(NamedTuple):
    """Describes one task of a worker: a run with a seed, or a function."""

    name: str
    config: dict[str, Any] | None
    """Config of `windtunnel simulate`; None for a function."""
    function: Callable[[], float] | None
    metrics: tuple[str, ...]
    """Figures of the run that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Holds rows with the composed points of their comparisons."""

    rows: tuple[Row, ...]
    points: Mapping[tuple[str, str, str], Point]
    """(experiment, arm, swept value as text) -> point."""
    seeds: tuple[int, ...]

    def tasks(self) -> dict[tuple[str, ...], Work]:
        """Returns the distinct tasks of all rows by key."""
        found: dict[tuple[str, ...], Work] = {}
        metrics = _metrics(self.rows)
        for row in self.rows:
            if isinstance(row.ours, Searched):
                found[(row.name,)] = Work(f"row {row.name}", None, row.ours.function, ())
            elif isinstance(row.ours, Sampled):
                for seed in self.seeds:
                    function = partial(row.ours.function, seed)
                    found[(row.name, str(seed))] = Work(f"row {row.name}, seed {seed}", None, function, ())
            elif isinstance(row.ours, Compared):
                for seed in self.seeds:
                    for where in _places(row.ours):
                        name = f"{where[0]}, arm {where[1]}, seed {seed}"
                        config = self.points[where].with_seed(seed)
                        found[(*where, str(seed))] = Work(name, config, None, metrics[row.ours.experiment])
        return found

    def interval(self, row: Row, results: Mapping[tuple[str, ...], Mapping[str, float]]) -> Interval:
        """Returns our figure of a row; NaN if a task of it has no result."""
        ours = row.ours
        if isinstance(ours, Direct):
            return mean_interval([ours.function()])
        if isinstance(ours, Searched):
            return mean_interval([results.get((row.name,), {}).get(VALUE, NAN)])
        if isinstance(ours, Sampled):
            return mean_interval(
                [results.get((row.name, str(seed)), {}).get(VALUE, NAN) for seed in self.seeds]
            )
        arms = [
            [results.get((*where, str(seed)), {}).get(ours.metric, NAN) for seed in self.seeds]
            for where in _places(ours)
        ]
        if ours.over is None:
            return _scaled(mean_interval(arms[0]), 100.0 if ours.shown == "percent" else 1.0)
        ratio = compare_paired(*arms).ratio or Interval(NAN, NAN, NAN, 0)
        if ours.shown == "times less":
            return Interval(1 / ratio.mean, 1 / ratio.high, 1 / ratio.low, ratio.num_values)
        if ours.shown == "% less":
            mean, low, high = (100 * (1 - bound) for bound in (ratio.mean, ratio.high, ratio.low))
            return Interval(mean, low, high, ratio.num_values)
        return ratio


def planned(rows: Sequence[Row], seeds: Sequence[int], dirs: Sequence[Path]) -> Plan:
    """Composes and builds every arm that the rows need. Raises ConfigError, which names the experiment."""
    simulate = ConfigSource(config_name="simulate", dirs=dirs)
    wanted: dict[str, list[tuple[str, Any]]] = {}
    for row in rows:
        if isinstance(row.ours, Compared):
            wanted.setdefault(row.ours.experiment, []).extend(_arms(row.ours))
    found: dict[tuple[str, str, str], Point] = {}
    for name, arms_of_it in wanted.items():
        experiment = experiment_of(name, dirs)
        for at in {str(at): at for _, at in arms_of_it}.values():
            arms = [arm for arm, swept in arms_of_it if swept == at]
            try:
                for point in points(CompareSettings(experiment=_part(experiment, arms, at)), simulate):
                    found[(name, point.arm, str(at))] = point
            except (ConfigError, ValueError) as error:
                raise ConfigError(f"experiment={name}: {error}") from error
    return Plan(rows=tuple(rows), points=found, seeds=tuple(seeds))


def done(
    plan: Plan, jobs: int, cache: Path | None, dirs: Sequence[Path], report: Report
) -> tuple[dict[tuple[str, ...], dict[str, float]], bool]:
    """Does all tasks of the plan; returns their results by key, and whether Ctrl-C ended it early.

    cache: folder of the results of earlier commands with the same code and settings; None: nothing is kept.
    Raises CannotWriteError if it cannot be made or written.
    """
    tasks = plan.tasks()
    files = {} if cache is None else _files(tasks, cache, dirs)
    results = {key: kept for key, file in files.items() if (kept := _read(file)) is not None}
    left = [key for key in tasks if key not in results]
    if cache is not None and left:
        with file_errors_reported(cache, CURE):
            cache.mkdir(parents=True, exist_ok=True)  # before the runs, which take minutes
    with ctrl_c_noted() as interrupt:
        outcomes = in_turn(result_of, [tasks[key] for key in left], max(min(jobs, len(left)), 1), interrupt)
        for index, result in outcomes:
            key = left[index]
            results[key] = result
            if cache is not None:
                with file_errors_reported(cache, CURE):
                    write_whole(files[key], json.dumps(result))
            report(len(results), len(tasks))
        return results, interrupt.noted and len(results) < len(tasks)


def result_of(work: Work) -> dict[str, float]:
    """Runs one simulation of the gallery and returns its result."""
    if work.function is not None:
        return {VALUE: float(work.function())}
    assert work.config is not None
    found = figures(simulate_config(work.config).summary)
    return {metric: found[metric] for metric in work.metrics if metric in found}


def _metrics(rows: Iterable[Row]) -> dict[str, tuple[str, ...]]:
    """Returns the figures that the rows read, by experiment."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        if isinstance(row.ours, Compared):
            found.setdefault(row.ours.experiment, {})[row.ours.metric] = None
    return {name: tuple(sorted(keys)) for name, keys in found.items()}


def _places(ours: Compared) -> list[tuple[str, str, str]]:
    """Returns the points of a figure: its arm, then the one that it is divided by."""
    return [(ours.experiment, arm, str(at)) for arm, at in _arms(ours)]


def _arms(ours: Compared) -> list[tuple[str, Any]]:
    """Returns the arms of a figure with their swept values."""
    if ours.over is None:
        return [(ours.arm, ours.at)]
    return [(ours.arm, ours.at), (ours.over, ours.at if ours.over_at is None else ours.over_at)]


def experiment_of(name: str, dirs: Sequence[Path]) -> Experiment:
    """Returns a comparison of the config folders."""
    source = ConfigSource(config_name="compare", dirs=dirs)
    return build_settings(resolved(composed(source, [f"experiment={name}"]))).experiment


def _part(experiment: Experiment, arms: Sequence[str], at: Any) -> Experiment:
    """Returns the experiment with some of its arms at one swept value."""
    for arm in arms:
        if arm not in experiment.arms:
            raise ValueError(f"arm {arm}: is not in the experiment; {suggest(arm, experiment.arms)}")
    # A comparison has two arms or more: a figure of a single arm takes another along, which does not run.
    kept = dict.fromkeys([*arms, experiment.baseline, *experiment.arms])
    names = list(kept)[: max(len(set(arms)), 2)]
    sweep = None if experiment.sweep is None else replace(experiment.sweep, values=(at,))
    if (at is None) != (sweep is None):
        raise ValueError(f"at={at}: a comparison with a sweep needs one of its values, another one none")
    return replace(
        experiment,
        arms={name: experiment.arms[name] for name in names},
        baseline=names[0],
        sweep=sweep,
        expect=(),
    )


def _scaled(interval: Interval, factor: float) -> Interval:
    mean, low, high = (factor * bound for bound in interval[:3])
    return Interval(mean, low, high, interval.num_values)


def _files(
    tasks: Mapping[tuple[str, ...], Work], cache: Path, dirs: Sequence[Path]
) -> dict[tuple[str, ...], Path]:
    """Returns the file of each task's result, named by a digest of code, settings and figures."""
    simulator, own = code_version(dirs), _own_code()
    found = {}
    for key, work in tasks.items():
        about = [simulator, as_text([work.config, work.metrics])] if work.config else [simulator, own, *key]
        digest = hashlib.blake2b("\n".join(about).encode(), digest_size=12).hexdigest()
        found[key] = cache / f"{digest}.json"
    return found


def _own_code() -> str:
    digest = hashlib.blake2b(digest_size=12)
    for folder in OWN_CODE:
        files = (Path(__file__).parents[1] / folder).rglob("*")
        for file in sorted(file for file in files if file.suffix in (".py", ".yaml")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> dict[str, float] | None:
    """Returns a kept result; None if there is none, or if its file is damaged: then it is computed again."""
    with suppress(ConfigError):
        found = read_json_object(file)
        if all(isinstance(value, int | float) for value in found.values()):
            return {str(key): float(value) for key, value in found.items()}
    return None
