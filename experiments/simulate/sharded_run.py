"""Runs the shards of a run by a launcher, keeps each as it finishes, and merges them.

The finished shards of a run that goes on are in the folder `shards` of its results. `shards.json` says which
run it is, and N.zip is shard N. A file gets its name when it is complete, and only the command itself writes,
so a shard counts once however often it was begun. The folder is removed when the result of the whole run is
written.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.app.job import CannotWriteError
from experiments.app.run_folder import UNFINISHED, lock_folder, seen_from_here
from experiments.app.settings.override import not_about
from experiments.simulate.shard_task import ShardTask, code_of_windtunnel
from experiments.study.launchers.launcher import Launcher
from experiments.study.launchers.outcome import CannotLaunchError, WorkerDiedError
from experiments.study.progress import lasting_progress
from sim.engine.clock import Interrupt, ctrl_c_noted
from sim.metrics.result import RunResult
from sim.metrics.sketches import SKETCHED
from sim.records.timed_rows import interval_s
from sim.report.chunk_tables import ITERATIONS_BYTES, REQUESTS, ChunkTables, add_exact_percentiles
from sim.report.files import config_digest, write_whole
from sim.report.numbers import number
from sim.report.wording import plural
from sim.settings.errors import ConfigError
from sim.settings.recorded import read_json_object
from sim.setup.scenario import Scenario
from sim.shards.intervals import merged_intervals
from sim.shards.merge import merged
from sim.shards.request_rows import merged_groups
from sim.shards.shard_file import DamagedShardError, ShardFile
from sim.shards.sums import merged_sums
from sim.shards.whole_run import shard_bounds
from sim.workload.trace_source import checks_for_others

NOT_OF_THE_RUN = ("launcher", "output")
"""Root keys that may differ when a run is continued."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFolder:
    """The folder of the shards of a run. command: the command that continues it, for messages."""

    path: Path
    num_shards: int
    command: str

    @classmethod
    @contextmanager
    def opened(
        cls, run_folder: Path, config: Mapping[str, Any], num_shards: int, code: str, command: str
    ) -> Iterator[ShardFolder]:
        """Yields the folder, which no other process has meanwhile.

        num_shards: of a new run; a run that is continued keeps its own. The folder is removed if no shard is
        in it at the end. Raises ConfigError for shards of another run, and OSError if the folder cannot be
        written.
        """
        about_file = run_folder / UNFINISHED
        path = about_file.parent
        path.mkdir(parents=True, exist_ok=True)
        run = {
            name: config_digest({name: value}) for name, value in config.items() if name not in NOT_OF_THE_RUN
        }
        about: dict[str, Any] = {"run": run, "code": code, "num_shards": num_shards}
        with lock_folder(path):
            if about_file.exists():
                found = read_json_object(about_file)
                if other := _other(found, about):
                    raise ConfigError(
                        f"{path}: holds shards of a run with other {other}; choose another hydra.run.dir, or "
                        "add overwrite=true to begin anew"
                    )
                about = found
            else:
                for rest in path.glob("*.zip"):  # a command was killed while it removed them
                    rest.unlink()
                write_whole(about_file, f"{json.dumps(about)}\n")
            for part in run_folder.glob(".*.part"):  # a command was killed while it wrote the result
                part.unlink()
            folder = cls(path=path, num_shards=int(about["num_shards"]), command=command)
            try:
                yield folder
            finally:
                if len(folder.missing()) == folder.num_shards:
                    folder.remove()

    def missing(self) -> list[int]:
        """Returns the shards that have not been simulated, or whose file is damaged."""
        return [index for index in range(self.num_shards) if not self._file(index).exists()]

    def keep(self, index: int, content: bytes) -> None:
        """Writes the file of a shard. Raises CannotWriteError, after which the other shards are kept."""
        try:
            write_whole(self._file(index), content)
        except OSError as error:
            num_kept = self.num_shards - len(self.missing())
            raise CannotWriteError(
                f"{error.filename}: {error.strerror}; {num_kept:,} of {self.num_shards:,} shards are kept; "
                f"make room, then continue: {self.command}"
            ) from error

    @contextmanager
    def files(self) -> Iterator[Iterator[ShardFile]]:
        """Yields the files of all shards in order, each of which is open until the next one is read.

        Raises ConfigError if reading in the context finds the last one damaged, and removes it.
        """
        last: Path | None = None

        def opened() -> Iterator[ShardFile]:
            nonlocal last
            for index in range(self.num_shards):
                last = self._file(index)
                with closing(ShardFile(last)) as file:
                    yield file

        try:
            yield opened()
        except DamagedShardError as error:
            assert last is not None
            last.unlink()
            raise ConfigError(f"{last}: is damaged, and was removed; continue: {self.command}") from error

    def remove(self) -> None:
        """Removes the folder, as its shards are in the result; its first file first, so that it is no run."""
        with suppress(OSError):
            (self.path / UNFINISHED.name).unlink()
            shutil.rmtree(self.path)

    def _file(self, index: int) -> Path:
        return self.path / f"{index}.zip"


def _other(found: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Returns what the run of the shards has otherwise than this one, such as the names of settings."""
    if found.get("code") != about["code"]:
        return "code of windtunnel"
    theirs, own = found["run"], about["run"]
    return ", ".join(name for name in {**own, **theirs} if own.get(name) != theirs.get(name))


SHARD_BYTES = 600
"""Bytes of the file of a shard for each of its requests, about: 574 with 16 iterations per request."""
STREAMED_BYTES = 290
"""Bytes of the file of a shard of a run that streams, and of its tables, for each of its requests, about."""
ACCUMULATOR_BYTES = 700_000
"""Bytes of the accumulators of a shard of a run that streams, about: 500,000 to 700,000 were seen."""
MAX_TRIES = 3
"""How often a shard is begun whose worker dies."""


def check_room(
    folder: Path, num_requests: int | None, num_shards: int, *, streams: bool, iterations: bool = False
) -> None:
    """Raises ConfigError if the shards of so many requests would not fit on the disk of the results."""
    needed = (STREAMED_BYTES if streams else SHARD_BYTES) * (num_requests or 0)
    if iterations:
        needed += 2 * ITERATIONS_BYTES * (num_requests or 0)  # in shards, and in the tables
    if streams:
        needed += ACCUMULATOR_BYTES * num_shards
    free = disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"hydra.run.dir={seen_from_here(folder)}: {number(needed / 1e6)} MB are needed for the "
            f"shards of {num_requests:,} requests, and {number(free / 1e6)} MB are free; make "
            "room, or choose a folder on another disk"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedRun:
    """A run in shards. config: its resolved config. overrides, config_dirs: those of the command."""

    scenario: Scenario
    config: dict[str, Any]
    launcher: Launcher
    overrides: Sequence[str]
    config_dirs: Sequence[Path]
    num_requests: int | None
    progress: bool
    streams: bool = False
    """Adds up figures and rows of requests, in memory that does not grow with the run."""
    plots: bool = False
    """Whether a run that streams adds up what its plots show."""
    iterations: bool = False
    """Whether a run that streams has the tables of iterations and gaps, too."""

    @contextmanager
    def simulated(self, folder: Path, console: Console) -> Iterator[ShardFolder]:
        """Simulates the shards that the folder lacks, and yields the folder of all shards.

        Raises ConfigError, CannotWriteError, and KeyboardInterrupt after Ctrl-C; finished shards are kept.
        """
        bounds = shard_bounds(
            self.scenario.sim.shards or 1,
            self.scenario.num_replicas,
            self.num_requests,
            self.launcher.num_jobs,
        )
        folder.mkdir(parents=True, exist_ok=True)
        check_room(folder, self.num_requests, len(bounds), streams=self.streams, iterations=self.iterations)
        code, command = code_of_windtunnel(), self._command(folder)
        # The files of shards depend on these settings of the output.
        tables = "stream_all" if self.iterations else self.streams
        config = self.config | {"output.tables": tables, "output.report": self.plots}
        with ShardFolder.opened(folder, config, len(bounds), code, command) as shards:
            self._run_missing(shards, console)
            yield shards

    def result(self, folder: Path, console: Console) -> tuple[RunResult, ShardFolder]:
        """Returns the result of the whole run, with its tables or, if it streams, with these in the folder.

        Raises what `simulated` raises.
        """
        with self.simulated(folder, console) as shards, shards.files() as files:
            if self.streams:
                return self._streamed(files, folder), shards
            read = [file.records() for file in files]
            records = merged([shard for shard, _ in read], self.scenario.sim.until_s)
            return self.scenario.result(records, read[0][1]), shards

    def _streamed(self, files: Iterable[ShardFile], folder: Path) -> RunResult:
        """Merges the files of all shards, and writes the tables."""
        scenario = self.scenario
        setting = partial(scenario.figure_setting, scenario.pool_hardware(), kept=SKETCHED, plots=self.plots)
        run = merged_sums(files, setting, scenario.sim.until_s)
        result = scenario.result_of_sums(run.sums, run.end, run.notes)
        try:
            width_s = interval_s(scenario.num_replicas) if self.iterations else None
            tables = ChunkTables(folder, width_s=width_s)
            for rows in merged_groups(run.rows):
                tables.add_group(rows)
            for name, members in run.intervals.items():
                for rows in merged_intervals(name, members):
                    tables.add_interval(name, rows)
            tables.finish(run.end, run.sums)
            if scenario.metrics.percentiles == "exact":
                add_exact_percentiles(result.summary, folder / REQUESTS)
        except OSError as error:
            return replace(result, error=error)
        return result

    def _command(self, folder: Path, *, here: bool = False) -> str:
        """Returns the command that continues the run. here: on this machine, whatever the launcher was."""
        own = [*not_about(self.overrides, "launcher"), "launcher=local"] if here else self.overrides
        folders = [f"--config-dir={each}" for each in self.config_dirs]
        where = f"hydra.run.dir={seen_from_here(folder)}"
        return shlex.join(["windtunnel", "simulate", *folders, *own, where])

    def _run_missing(self, shards: ShardFolder, console: Console) -> None:
        """Simulates the missing shards; those whose worker has died are tried again."""
        missing = shards.missing()
        num_kept = shards.num_shards - len(missing)
        if num_kept:
            console.print(Text(f"{plural(num_kept, 'shard')} done; {len(missing):,} missing."))
        progress = lasting_progress(
            console, shards.num_shards, num_kept, enabled=self.progress, part="shard", failure="lost"
        )
        lost: WorkerDiedError | None = None
        checks = checks_for_others(shards.path) if missing else []
        with ctrl_c_noted() as interrupt, progress as report:
            for _ in range(MAX_TRIES):
                if not (missing := shards.missing()) or interrupt.noted:
                    break
                lost = self._try(shards, self._tasks(shards, missing, checks), interrupt, report) or lost
        missing = shards.missing()
        if interrupt.noted and missing:
            console.print(
                f"{plural(len(missing), 'shard')} left; to continue: {shards.command}",
                style="yellow",
                soft_wrap=True,
                highlight=False,
            )
            raise KeyboardInterrupt
        if missing:
            raise ConfigError(
                f"{plural(len(missing), 'shard')} of {shards.num_shards:,} lost {MAX_TRIES} times: {lost}; "
                f"the others are kept; to continue: {shards.command}"
            )

    def _try(
        self, shards: ShardFolder, tasks: Sequence[ShardTask], interrupt: Interrupt, report: Any
    ) -> WorkerDiedError | None:
        """Begins each shard once and keeps those that finish; returns an error of a lost one."""
        outcomes = self.launcher.outcomes(ShardTask.run, tasks, interrupt)
        lost: WorkerDiedError | None = None
        num_lost, num_kept = 0, shards.num_shards - len(tasks)
        try:
            for outcome in outcomes:
                if isinstance(outcome.error, WorkerDiedError):
                    lost, num_lost = outcome.error, num_lost + 1
                elif outcome.error is not None:
                    raise outcome.error
                else:
                    assert outcome.result is not None
                    shards.keep(tasks[outcome.index].index, outcome.result.content)
                    num_kept += 1
                report(num_kept, num_lost)
        except CannotLaunchError as error:
            here = self._command(shards.path.parent, here=True)
            raise ConfigError(f"{error}; to run on this machine: {here}") from error
        finally:
            outcomes.close()
        return lost

    def _tasks(self, shards: ShardFolder, missing: Sequence[int], checks: Sequence[bytes]) -> list[ShardTask]:
        own = {name: value for name, value in self.config.items() if name not in NOT_OF_THE_RUN}
        text, code = json.dumps(own), code_of_windtunnel()
        return [
            ShardTask(
                index=index,
                num_shards=shards.num_shards,
                config=text,
                import_dirs=(os.getcwd(),),
                code=code,
                checks=tuple(checks),
                streams=self.streams,
                plots=self.plots,
                iterations=self.iterations,
            )
            for index in missing
        ]
