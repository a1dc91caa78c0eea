"""`launcher=submitit`: jobs of Slurm, or processes of this machine, with a chunk of the runs each.

A job writes each result to a file at once, so results are kept if the job is killed. The run that was running
is lost, and the other runs of its chunk go into another job.
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic

from experiments.study.launchers.importing import passed_on
from experiments.study.launchers.launcher import PATIENCE_S, Launcher, Workers
from experiments.study.launchers.outcome import CannotLaunchError, Outcome, R, T, WorkerDiedError, attempt
from fieldlimits import Gt, OneOf

CLUSTERS = ("local", "slurm")
MAX_RUNS_PER_JOB = 200
SLURM_JOBS = 32
GRACE_S = 10.0
"""Seconds that a shared disk may take to show a job's files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BySubmitit(Launcher):
    """Launches runs with submitit; the fields are submitit's parameters."""

    cluster: Annotated[str, OneOf(CLUSTERS)] = "local"
    jobs: Annotated[int | None, Gt(0)] = None
    runs_per_job: Annotated[int | None, Gt(0)] = None
    timeout_min: Annotated[int, Gt(0)] = 60
    cpus_per_task: Annotated[int, Gt(0)] = 1
    mem_gb: Annotated[float, Gt(0)] = 4.0
    slurm_partition: str | None = None
    slurm_account: str | None = None
    slurm_qos: str | None = None
    slurm_setup: tuple[str, ...] = ()
    folder: str = ".submitit"

    @property
    def num_jobs(self) -> int:
        """Number of concurrent jobs."""
        return self.jobs or (SLURM_JOBS if self.cluster == "slurm" else os.cpu_count() or 1)

    def workers(self, work: Callable[[T], R], num_tasks: int | None) -> Workers[T, R]:
        """Returns the workers, see `Launcher`. Tasks whose number is not known have a job each."""
        folder = Path(self.folder).resolve() / uuid.uuid4().hex[:12]
        shared = 1 if num_tasks is None else min(MAX_RUNS_PER_JOB, -(-num_tasks // (2 * self.num_jobs)))
        return _Jobs(self._executor(folder), folder, work, self.num_jobs, self.runs_per_job or shared)

    def _executor(self, folder: Path) -> Any:
        try:
            submitit = importlib.import_module("submitit")
        except ImportError as error:
            raise CannotLaunchError(
                "launcher=submitit: needs submitit: pip install 'windtunnel[submitit]'"
            ) from error
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)  # results are unpickled: only this user may write them
            executor = submitit.AutoExecutor(folder=folder, cluster=self.cluster)
        except OSError as error:
            raise CannotLaunchError(f"launcher.folder={self.folder}: {error.strerror}") from error
        except RuntimeError as error:  # srun is missing
            raise CannotLaunchError(
                f"launcher.cluster={self.cluster}: {str(error).partition(chr(10))[0]}"
            ) from error
        slurm = {
            name: getattr(self, name)
            for name in ("slurm_partition", "slurm_account", "slurm_qos", "slurm_setup")
            if getattr(self, name)
        }
        if "slurm_setup" in slurm:
            slurm["slurm_setup"] = list(self.slurm_setup)
        executor.update_parameters(
            name="windtunnel",
            timeout_min=self.timeout_min,
            cpus_per_task=self.cpus_per_task,
            mem_gb=self.mem_gb,
            **(slurm if self.cluster == "slurm" else {}),
        )
        return executor


class _Jobs(Workers[T, R]):
    """Jobs of up to `size` tasks each. Ctrl-C cancels them, because they may have hours of runs left."""

    grace_s = 0.0

    def __init__(self, executor: Any, folder: Path, work: Callable[[T], R], num_jobs: int, size: int) -> None:
        self._executor, self._folder, self._work = executor, folder, work
        self._num_jobs, self._size, self.room = num_jobs, size, num_jobs * size
        self._waiting: dict[int, T] = {}
        self._running: list[_Chunk[T]] = []

    def submit(self, index: int, task: T) -> None:
        self._waiting[index] = task
        self._begin(self._size)

    def _begin(self, least: int) -> None:
        """Begins jobs, while so many may run, with the first of the tasks that wait, if these are as many."""
        while len(self._waiting) >= least and len(self._running) < self._num_jobs:
            tasks = {index: self._waiting.pop(index) for index in list(self._waiting)[: self._size]}
            results = self._folder / "results"
            results.mkdir(exist_ok=True)
            with passed_on():
                job = self._executor.submit(_run_chunk, self._work, list(tasks.items()), str(results))
            self._running.append(_Chunk(job=job, results=results, tasks=tasks))

    def ended(self) -> Iterator[Outcome[R]]:
        self._begin(1)
        time.sleep(PATIENCE_S)
        for chunk in list(self._running):
            has_ended = chunk.job.done(force_check=True)
            yield from chunk.new_outcomes()
            if not has_ended:
                continue
            self._running.remove(chunk)
            if not chunk.is_complete:
                lost, rest = chunk.lost()
                self._waiting = rest | self._waiting
                yield from lost

    def end(self, *, whole: bool) -> None:
        for chunk in self._running:
            chunk.job.cancel()
        if whole:
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):
                self._folder.parent.rmdir()  # fails if other sweeps use it


@dataclass(kw_only=True, slots=True)
class _Chunk(Generic[T]):
    """A job and its tasks by index, in its order."""

    job: Any
    results: Path
    tasks: dict[int, T]
    seen: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        return len(self.seen) == len(self.tasks)

    def new_outcomes(self) -> Generator[Outcome[Any], None, None]:
        """Yields the outcomes of tasks whose results have arrived since the last call."""
        for index in self.tasks:
            file = self.results / f"{index}.pkl"
            if index not in self.seen and file.exists():
                # Written by our own job, in a folder of mode 700.
                result, error = pickle.loads(file.read_bytes())  # nosec B301
                file.unlink()
                self.seen.add(index)
                yield Outcome(index, result, error)

    def lost(self) -> tuple[list[Outcome[Any]], dict[int, T]]:
        """Returns, after a job's early end, outcomes of the lost tasks, and the tasks that it had not begun.

        If the job has begun nothing, it cannot run at all: all of its tasks are lost.
        """
        deadline = time.monotonic() + (GRACE_S if self.job.exception() is None else 0.0)
        outcomes = list(self.new_outcomes())
        while not self.is_complete and time.monotonic() < deadline:
            time.sleep(PATIENCE_S)
            outcomes += self.new_outcomes()
        left = [index for index in self.tasks if index not in self.seen]
        if not left:
            return outcomes, {}
        begun = (self.results / f"{left[0]}.begun").exists()
        gone = left[:1] if begun else left
        error = WorkerDiedError(f"its job {self.job.job_id} ended early; see its log {self.job.paths.stderr}")
        rest = {index: self.tasks[index] for index in left[len(gone) :]}
        return [*outcomes, *(Outcome(index, None, error) for index in gone)], rest


def _run_chunk(work: Callable[[T], R], chunk: Sequence[tuple[int, T]], results: str) -> None:
    """Runs the tasks of one chunk inside a job."""
    for index, task in chunk:
        (Path(results) / f"{index}.begun").touch()
        part = Path(results) / f".{index}.part"
        part.write_bytes(pickle.dumps(attempt(work, task)))
        os.replace(part, Path(results) / f"{index}.pkl")
