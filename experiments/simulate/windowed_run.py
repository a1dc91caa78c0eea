"""Runs a fleet whose router reads only signals in several processes of this machine, window after window.

The processes wait for each other at every fetch of the signals, hundreds of times per second, so they are
neither jobs of Slurm nor tasks of Ray, and a run that loses one of them cannot go on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from experiments.simulate.part_process import PartElsewhere, PartTask, answers_at_end, new_part
from experiments.simulate.sharded_run import check_room
from experiments.study.launchers.local import Local
from experiments.study.launchers.outcome import WorkerDiedError
from experiments.study.progress import lasting_progress
from sim.engine.interrupt import Interrupt, ctrl_c_noted
from sim.metrics.result import RunResult
from sim.records.run import RunRecords
from sim.settings.errors import ConfigError
from sim.settings.policy_errors import policy_errors
from sim.setup.scenario import Scenario
from sim.setup.streamed_run import figure_setting
from sim.shards.merge import merged
from sim.shards.shard_file import ShardFile
from sim.shards.streamed import StreamedShards, merged_files
from sim.shards.streamed_part import PartFile
from sim.shards.windows import Part, WindowGateway, part_bounds
from sim.workload.base import Source

ROWS = "windows"
"""The folder, in that of the results, of the rows of requests until they are merged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFiles:
    """The results of the parts of a run that streams. path: the folder of the rows of their requests."""

    path: Path
    contents: Sequence[bytes]

    @contextmanager
    def files(self) -> Iterator[Iterator[ShardFile]]:
        """Yields what each part has left, by replica."""
        yield (PartFile(content, rows_of(self.path, index)) for index, content in enumerate(self.contents))

    def remove(self) -> None:
        """Removes the folder, as its rows are in the result."""
        shutil.rmtree(self.path, ignore_errors=True)


def rows_of(folder: Path, index: int) -> Path:
    """Returns the file of the rows of a part."""
    return folder / f"{index}.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedRun:
    """A run in windows. config: its resolved config. source: the traffic that the gateway reads."""

    scenario: Scenario
    source: Source
    config: dict[str, Any]
    launcher: Local
    progress: bool = False
    plots: bool = True
    """Whether a run that streams adds up what its plots show."""
    iterations: bool = False
    """Whether a run that streams has the tables of iterations and gaps, too."""
    continues: ClassVar[bool] = False
    """Whether the run uses what an earlier one has left in its folder."""

    def result(self, folder: Path, console: Console) -> tuple[RunResult, None]:
        """Simulates; returns the result of the whole run. No parts are kept on disk.

        Raises ConfigError, also if a process dies, and KeyboardInterrupt after Ctrl-C.
        """
        records = self.records(console)
        return self.scenario.result(records, self.source.notes), None

    def records(self, console: Console) -> RunRecords:
        """Simulates; returns the records of the whole run. Errors: see `result`."""
        return merged(self._parts(None, console), self.scenario.sim.until_s)

    @contextmanager
    def simulated(self, folder: Path, console: Console) -> Iterator[PartFiles]:
        """Simulates, and yields what the parts have left, for `streamed`; it is removed afterwards.

        Raises what `result` raises, and OSError if rows could not be written.
        """
        rows = folder / ROWS
        check_room(folder, self.source.num_requests, 0, streams=True, iterations=self.iterations)
        shutil.rmtree(rows, ignore_errors=True)  # of a run that was killed
        rows.mkdir(parents=True)
        found = PartFiles(path=rows, contents=())
        try:
            found = PartFiles(path=rows, contents=self._parts(rows, console))
            yield found
        finally:
            found.remove()

    def streamed(self, files: Iterable[ShardFile]) -> StreamedShards:
        """Returns the whole run without its tables, from the files of all parts."""
        scenario = self.scenario
        new_setting = partial(figure_setting, scenario, scenario.pool_hardware(), plots=self.plots)
        run = merged_files(files, new_setting, scenario.sim.until_s)
        return run._replace(notes=self.source.notes)

    def _parts(self, rows: Path | None, console: Console) -> list[Any]:
        """Simulates; returns what each part has to say at the end. rows: see `PartTask`."""
        scenario = self.scenario
        num_processes = self.launcher.jobs or os.cpu_count() or 1
        bounds = part_bounds(scenario.sim.shards or 1, scenario.num_replicas, num_processes)
        config = json.dumps(self.config)
        tasks = [
            PartTask(
                config=config,
                bounds=own,
                rows=None if rows is None else rows_of(rows, index),
                plots=self.plots,
                iterations=self.iterations,
            )
            for index, own in enumerate(bounds)
        ]
        progress = lasting_progress(
            console, self.source.num_requests, 0, enabled=self.progress, part="request", failure=None
        )
        elsewhere: list[PartElsewhere] = []
        try:
            with ctrl_c_noted() as interrupt:  # so that a process has no traceback of it while it starts
                elsewhere += [PartElsewhere(task) for task in tasks[:-1]]
            if interrupt.noted:
                raise KeyboardInterrupt
            with policy_errors(scenario), progress as show:
                gateway = WindowGateway(
                    self.source,
                    scenario.for_a_run().routing,
                    scenario.replica_pools(),
                    age_s=scenario.signal_age_s,
                    until_s=scenario.sim.until_s,
                )
                # The last part runs in this process, which would wait for it otherwise.
                here = new_part(scenario, scenario.source(), tasks[-1])
                parts: list[Part] = [*elsewhere, here]

                def report(*_: object) -> None:
                    show(sum(part.num_ended for part in parts), 0)

                # Nothing is kept, so Ctrl-C ends the run wherever it is, as KeyboardInterrupt.
                rest = gateway.run(parts, Interrupt(), report)
                for part in elsewhere:
                    part.begin_end(rest)
                last = here.finish(rest, report)
                return [*answers_at_end(elsewhere, report), last]
        except WorkerDiedError as error:
            raise ConfigError(
                f"sim.shards={scenario.sim.shards}: {error}; parts of a run with signals cannot go on "
                f"without each other, and nothing is kept; {_advice(rows)}"
            ) from error
        finally:
            for part in elsewhere:
                part.end()


def _advice(rows: Path | None) -> str:
    """Returns what can be done after a process was lost."""
    if rows is None:
        return "begin the run again, with output.tables=stream if memory was short"
    return "begin the run again, on a machine with more memory if that was short"
