"""A part of a fleet in windows, in a process of its own on this machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from experiments.study.launchers.outcome import CutShortError, WorkerDiedError, attempt
from experiments.study.launchers.parent import end_with_parent
from sim.records.timed_rows import interval_s
from sim.settings.policy_errors import policy_errors
from sim.settings.scenario import build_run
from sim.setup.scenario import Scenario
from sim.setup.streamed_run import figure_setting
from sim.shards.streamed_part import StreamedPart
from sim.shards.traffic import Bounds
from sim.shards.window_part import CountTable, PartHere, Replicas
from sim.workload.base import Source

FINISH = None
"""In place of the time of a fetch: run to the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTask:
    """A part of the fleet that a process simulates.

    config: the resolved config of the run, as JSON. bounds: the replicas. rows: the file to which the rows of
    requests are streamed; None: the process returns all tables at the end. plots: whether what the plots show
    is added up when rows are streamed. iterations: whether iterations and gaps are streamed, too.
    """

    config: str
    bounds: Bounds
    rows: Path | None = None
    plots: bool = True
    iterations: bool = False

    @property
    def name(self) -> str:
        """Returns the replicas of the part in words, for messages."""
        first, end = self.bounds
        return f"replica {first}" if end == first + 1 else f"replicas {first} to {end - 1}"


class Answer(NamedTuple):
    """A message from a process.

    is_done: whether it has done what it was asked; else it says only how far it is. num_ended: requests of
    the part that have ended.
    """

    is_done: bool
    num_ended: int
    value: Any = None
    error: Exception | None = None


class PartElsewhere:
    """A part of the fleet in a process of its own."""

    def __init__(self, task: PartTask) -> None:
        self.num_ended = 0
        self._task = task
        self.pipe, other = multiprocessing.Pipe()
        self._process = multiprocessing.Process(
            target=_serve, args=(other, task, os.getcwd(), os.getpid()), daemon=True
        )
        self._process.start()
        other.close()  # so that the pipe reports the end of the process

    def begin(self, replicas: Replicas, until_s: float) -> None:
        """Lets the process simulate up to a fetch."""
        self._send((until_s, replicas))

    def counts(self) -> CountTable:
        """Waits for the fetch; returns the counts of the part's replicas."""
        table: CountTable = self.received().value
        return table

    def begin_end(self, replicas: Replicas) -> None:
        """Lets the process simulate the last requests to the end of the run."""
        self._send((FINISH, replicas))

    def received(self) -> Answer:
        """Waits for the next answer.

        Raises its error, WorkerDiedError if the process has ended, and KeyboardInterrupt if Ctrl-C ended it.
        """
        try:
            answer: Answer = self.pipe.recv()
        except (EOFError, OSError) as gone:
            self._process.join()
            raise WorkerDiedError(
                f"the process of {self._task.name} {_how_ended(self._process.exitcode)}"
            ) from gone
        if isinstance(answer.error, CutShortError):
            raise KeyboardInterrupt
        if answer.error is not None:
            raise answer.error
        self.num_ended = answer.num_ended
        return answer

    def end(self) -> None:
        """Ends the process, whatever it is doing."""
        self.pipe.close()
        self._process.kill()
        self._process.join()

    def _send(self, message: object) -> None:
        with suppress(OSError):  # the next answer reports what has happened to the process
            self.pipe.send(message)


def _how_ended(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"ended abruptly (exit code {exitcode})"
    why = ", perhaps for lack of memory" if exitcode == -signal.SIGKILL else ""
    return f"was killed ({signal.Signals(-exitcode).name}){why}"


def answers_at_end(parts: Sequence[PartElsewhere], report: Callable[[], None]) -> list[Any]:
    """Waits until all parts have run to the end; returns what each has to say, by part.

    report is called from time to time. Raises what `PartElsewhere.received` raises.
    """
    found: dict[PartElsewhere, Any] = {}
    while running := [part for part in parts if part not in found]:
        ready = wait([part.pipe for part in running])
        for part in running:
            if part.pipe in ready and (answer := part.received()).is_done:
                found[part] = answer.value
        report()
    return [found[part] for part in parts]


def new_part(scenario: Scenario, source: Source, task: PartTask) -> PartHere | StreamedPart:
    """Returns the part of a run in this process. source: the traffic of the run, unread."""
    settings: dict[str, Any] = {
        "source": source,
        "pools": scenario.replica_pools(),
        "bounds": task.bounds,
        "cluster": scenario.for_a_run(),
        "sim": scenario.sim,
    }
    if task.rows is None:
        return PartHere(**settings)
    new_setting = partial(figure_setting, scenario, scenario.pool_hardware(), plots=task.plots)
    width_s = interval_s(scenario.num_replicas) if task.iterations else None
    return StreamedPart(**settings, new_setting=new_setting, rows=task.rows, width_s=width_s)


def _serve(pipe: Connection, task: PartTask, import_dir: str, parent: int) -> None:
    """Simulates a part as the gateway asks. SIGINT is ignored, because the gateway handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)
    if import_dir not in sys.path:
        sys.path.append(import_dir)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the gateway has gone
        server, error = attempt(partial(_Server, pipe), task)
        while server is not None and error is None:
            message = pipe.recv()
            value, error = attempt(partial(server.answer, *message), task)
            if error is None:
                pipe.send(Answer(True, server.num_ended, value))
        pipe.send(Answer(True, 0, error=error))


class _Server:
    """The simulation of a part in its process. pipe: for how far it is."""

    def __init__(self, pipe: Connection, task: PartTask) -> None:
        self._pipe = pipe
        self._scenario, source = build_run(json.loads(task.config))
        self._part = new_part(self._scenario, source, task)

    @property
    def num_ended(self) -> int:
        """Requests of the part that have ended."""
        return self._part.num_ended

    def answer(self, until_s: float | None, replicas: Replicas, task: PartTask) -> Any:
        """Simulates up to a fetch, and returns the counts; or to the end, and returns the records."""
        with policy_errors(self._scenario):
            if until_s is FINISH:
                return self._part.finish(replicas, self._report)
            self._part.begin(replicas, until_s)
            return self._part.counts()

    def _report(self, now: float, num_ended: int) -> None:
        self._pipe.send(Answer(False, num_ended))
