"""Runs a fleet whose router reads only signals in several processes of this machine, window after window.

The processes wait for each other at every fetch of the signals, hundreds of times per second, so they are
neither jobs of Slurm nor tasks of Ray, and a run that loses one of them cannot go on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments.study.launchers.local import Local
from experiments.study.launchers.outcome import WorkerDiedError
from experiments.study.launchers.parent import end_with_parent
from sim.engine.interrupt import ctrl_c_noted
from sim.metrics.result import RunResult
from sim.records.run import RunRecords
from sim.settings.errors import ConfigError
from sim.settings.policy_errors import policy_errors
from sim.settings.scenario import build_run
from sim.setup.scenario import Scenario
from sim.shards.merge import merged
from sim.shards.shard import ShardRecords
from sim.shards.traffic import Bounds
from sim.shards.windows import CountTable, PartHere, Replicas, WindowGateway, part_bounds
from sim.workload.base import Source

FINISH = None
"""In place of the time of a fetch: run to the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedRun:
    """A run in windows. config: its resolved config. source: the traffic that the gateway reads."""

    scenario: Scenario
    source: Source
    config: dict[str, Any]
    launcher: Local

    def result(self, folder: Path, console: Console) -> tuple[RunResult, None]:
        """Simulates; returns the result of the whole run. No parts are kept on disk.

        Raises ConfigError, also if a process dies, and KeyboardInterrupt after Ctrl-C.
        """
        records = self.records()
        return self.scenario.result(records, self.source.notes), None

    def records(self) -> RunRecords:
        """Simulates; returns the records of the whole run. Errors: see `result`."""
        scenario = self.scenario
        num_processes = self.launcher.jobs or os.cpu_count() or 1
        bounds = part_bounds(scenario.sim.shards or 1, scenario.num_replicas, num_processes)
        parts: list[PartElsewhere] = []
        try:
            with policy_errors(scenario), ctrl_c_noted() as interrupt:
                parts += [PartElsewhere(json.dumps(self.config), own) for own in bounds]
                gateway = WindowGateway(
                    self.source,
                    scenario.for_a_run().routing,
                    scenario.replica_pools(),
                    age_s=scenario.signal_age_s,
                    until_s=scenario.sim.until_s,
                )
                rest = gateway.run(parts, interrupt)
                for part in parts:
                    part.begin_end(rest)
                shards = [part.records() for part in parts] if not interrupt.noted else []
            if interrupt.noted:
                raise KeyboardInterrupt
        except WorkerDiedError as error:
            raise ConfigError(
                f"sim.shards={scenario.sim.shards}: {error}; nothing is kept; run it again"
            ) from error
        finally:
            for part in parts:
                part.end()
        return merged(shards, scenario.sim.until_s)


class PartElsewhere:
    """A part of the fleet in a process of its own. config: the resolved config of the run, as JSON."""

    def __init__(self, config: str, bounds: Bounds) -> None:
        self._pipe, other = multiprocessing.Pipe()
        self._process = multiprocessing.Process(
            target=_serve, args=(other, config, bounds, os.getcwd(), os.getpid()), daemon=True
        )
        self._process.start()
        other.close()  # so that the pipe reports the end of the process

    def begin(self, replicas: Replicas, until_s: float) -> None:
        """Lets the process simulate up to a fetch."""
        self._send((until_s, replicas))

    def counts(self) -> CountTable:
        """Waits for the fetch; returns the counts of the part's replicas."""
        table: CountTable = self._received()
        return table

    def begin_end(self, replicas: Replicas) -> None:
        """Lets the process simulate the last requests to the end of the run."""
        self._send((FINISH, replicas))

    def records(self) -> ShardRecords:
        """Waits for the end of the run; returns the part's records."""
        shard: ShardRecords = self._received()
        return shard

    def end(self) -> None:
        """Ends the process, whatever it is doing."""
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def _send(self, message: object) -> None:
        with suppress(OSError):  # the next answer reports what has happened to the process
            self._pipe.send(message)

    def _received(self) -> Any:
        try:
            value, error = self._pipe.recv()
        except (EOFError, OSError) as gone:
            self._process.join()
            code = self._process.exitcode
            raise WorkerDiedError(
                f"a process of the run ended abruptly (exit code {code}), perhaps for lack of memory"
            ) from gone
        if error is not None:
            raise error
        return value


def _serve(pipe: Connection, config: str, bounds: Bounds, import_dir: str, parent: int) -> None:
    """Simulates a part as the gateway asks. SIGINT is ignored, because the gateway handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)
    if import_dir not in sys.path:
        sys.path.append(import_dir)
    value: Any
    try:
        scenario, source = build_run(json.loads(config))
        part = PartHere(
            source=source,
            pools=scenario.replica_pools(),
            bounds=bounds,
            cluster=scenario.for_a_run(),
            sim=scenario.sim,
        )
        while True:
            until_s, replicas = pipe.recv()
            with policy_errors(scenario):
                if until_s is FINISH:
                    value = part.finish(replicas)
                else:
                    part.begin(replicas, until_s)
                    value = part.counts()
            pipe.send((value, None))
    except (EOFError, OSError):
        return  # the gateway has gone
    except Exception as error:
        with suppress(OSError):
            pipe.send((np.empty(0), error))
