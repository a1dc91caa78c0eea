"""Simulates a shard of a run in a worker, perhaps on another machine; returns the content of its file."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from experiments.study.code import code_version
from sim.engine.replica_pool import ReplicaPool
from sim.metrics.sketches import SKETCHED
from sim.records.timed_rows import interval_s
from sim.settings.build import policy_errors
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run
from sim.setup.scenario import Scenario
from sim.shards.assignment import Assignment, assign
from sim.shards.shard import run_shard
from sim.shards.shard_file import shard_bytes
from sim.shards.sums import sums_bytes
from sim.shards.traffic import Bounds, ShardTraffic
from sim.shards.whole_run import shard_bounds
from sim.workload.trace_source import adopt

WORKERS = ("experiments/simulate", "experiments/study/launchers")
"""Code of workers that computes no figures, but must be that of the command."""


class FinishedShard(NamedTuple):
    """The content of the file of a shard, and the number of its requests."""

    content: bytes
    num_requests: int


class Prepared(NamedTuple):
    """The scenario and the assignment of a run, which all shards in a process share."""

    scenario: Scenario
    pools: list[ReplicaPool]
    assignment: Assignment
    bounds: list[Bounds]
    traffic: ShardTraffic


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTask:
    """A shard of a run."""

    index: int
    num_shards: int
    config: str
    """The resolved config of the whole run, as JSON."""
    import_dirs: tuple[str, ...]
    """Folders added to the import path for a user's own classes."""
    code: str
    """The code of windtunnel that all workers must have: see `code_of_windtunnel`."""
    checks: tuple[bytes, ...] = ()
    """The traces that the command has checked: see `sim.workload.trace_source`."""
    streams: bool = False
    """Returns accumulators of the figures and the rows of requests instead of all tables."""
    plots: bool = False
    """Whether the accumulators have what the plots show."""
    iterations: bool = False
    """Returns the tables of iterations and gaps, too, if it streams."""

    @property
    def name(self) -> str:
        return f"shard {self.index}"

    def run(self) -> FinishedShard:
        """Simulates the shard.

        Raises ConfigError in a worker with other code, and for mistakes that only show during a run, and
        KeyboardInterrupt after Ctrl-C.
        """
        here = code_of_windtunnel()
        if here != self.code:
            raise ConfigError(
                f"launcher: the worker on {platform.node()} has windtunnel {here}, but this command has "
                f"{self.code}; install the same version on all machines"
            )
        scenario, pools, assignment, bounds, traffic = _prepared(
            self.config, self.import_dirs, self.num_shards, self.checks
        )
        with policy_errors(scenario):
            source = traffic.source(self.index)
            shard = run_shard(source, assignment, pools, bounds[self.index], scenario, scenario.sim)
        if shard.records.interrupted:
            raise KeyboardInterrupt  # a part of a shard is no result
        if self.streams:
            setting = partial(
                scenario.figure_setting, scenario.pool_hardware(), kept=SKETCHED, plots=self.plots
            )
            width_s = interval_s(scenario.num_replicas) if self.iterations else None
            content = sums_bytes(shard, assignment.notes, setting, width_s)
        else:
            content = shard_bytes(shard, assignment.notes)
        return FinishedShard(content, len(shard.records.requests))


@cache
def code_of_windtunnel() -> str:
    """Returns the version of the installed package and the digest of its code."""
    try:
        number = version("windtunnel")
    except PackageNotFoundError:
        number = "unknown"
    return f"{number} (code {code_version([], WORKERS)})"


@lru_cache(maxsize=1)
def _prepared(config: str, import_dirs: Sequence[str], num_shards: int, checks: Sequence[bytes]) -> Prepared:
    """Builds the run and assigns its requests to replicas, once in each process."""
    for folder in import_dirs:
        if folder not in sys.path:  # last, so that they cannot shadow anything
            sys.path.append(folder)
    adopt(checks)
    settings: dict[str, Any] = json.loads(config)
    scenario, source = build_run(settings)
    with policy_errors(scenario):
        routing, pools = scenario.for_a_run().routing, scenario.replica_pools()
        assignment = assign(source, routing, pools, scenario.sim.until_s)
    bounds = shard_bounds(num_shards, scenario.num_replicas, None)
    return Prepared(scenario, pools, assignment, bounds, ShardTraffic(scenario.source, assignment, bounds))
