"""Prepares a run that is divided: into shards, or into parts that wait for each other at every fetch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.app.settings.compose import Composition
from experiments.simulate.output import SimulateOutput
from experiments.simulate.sharded_run import ShardedRun
from experiments.simulate.windowed_run import WindowedRun
from experiments.study.launchers.local import Local
from experiments.study.launchers.outcome import Launcher
from policies.core.policy_names import name_of
from policies.routing.static import reads_only_signals
from sim.report.numbers import number
from sim.settings.build import build
from sim.settings.errors import ConfigError
from sim.setup.divided_run import check_traffic
from sim.setup.scenario import Scenario
from sim.workload.base import Source


def divided(
    launcher: Mapping[Any, Any],
    config: dict[str, Any],
    composition: Composition,
    scenario: Scenario,
    source: Source,
    output: SimulateOutput,
    *,
    streams: bool,
) -> ShardedRun | WindowedRun:
    """Returns the run in parts that the settings ask for. Raises ConfigError if it cannot be divided so.

    launcher: the node of the launcher. config: the resolved config of the run.
    """
    shards, routing = scenario.sim.shards, scenario.routing
    try:
        check_traffic(source, scenario.sim)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    built: Launcher = build(launcher, "launcher", Launcher)
    if reads_only_signals(routing):
        if not isinstance(built, Local):
            raise ConfigError(
                f"sim.shards={shards}, routing={name_of(routing)}: parts of a run with signals wait for each "
                f"other at every fetch, each {number(scenario.signal_age_s)} s of simulated time, so "
                "messages between machines would take most of the time; choose launcher=local, or routing "
                "that reads no replica"
            )
        return WindowedRun(
            scenario=scenario,
            source=source,
            config=config,
            launcher=built,
            progress=output.progress,
            plots=output.report,
            iterations=output.writes_iterations,
        )
    return ShardedRun(
        scenario=scenario,
        config=config,
        launcher=built,
        overrides=composition.overrides,
        config_dirs=composition.source.dirs[1:],
        num_requests=source.num_requests,
        progress=output.progress,
        streams=streams,
        plots=streams and output.report,
        iterations=output.writes_iterations,
    )
