"""A simulated fleet and its server, from the settings to the figures of the session."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from aiohttp import web
from rich.console import Console

from experiments.serve.approximate_tokenizer import ApproximateTokenizer
from experiments.serve.backend import Backend, Tokenizer
from experiments.serve.driver import Controls, Outcome, Served, make_application
from experiments.serve.layers import WithoutRemoteKv
from experiments.serve.server import Stop
from experiments.serve.settings import KEY_VARIABLE, ServerSetup, ServeSettings, full_note
from experiments.serve.simulated.answers import Answers, OutputLengths
from experiments.serve.simulated.fleet import SimulatedFleet, WaitingLimit
from experiments.serve.simulated.metrics import FleetMetrics
from experiments.serve.simulated.remote_kv import RemoteKvLayer
from experiments.serve.simulated.replicas import PinnedRequests, SingleReplica, replica_ports
from experiments.serve.simulated.sleep import SleepyFleet
from sim.records.run import RunRecords
from sim.settings.build import policy_errors
from sim.settings.errors import ConfigError
from sim.setup.scenario import Scenario
from sim.workload.base import WorkloadNotes

if TYPE_CHECKING:
    from experiments.serve.kv_events.publisher import Publisher


def build_fleet(scenario: Scenario, settings: ServeSettings, time_scale: float) -> SimulatedFleet:
    """Returns the fleet; its clock does not run yet. Raises ConfigError."""
    try:
        tokenizer = _tokenizer(settings.tokenizer)
        longest = min(pool.max_model_len for pool in scenario.pools_by_name.values())
        fleet = SimulatedFleet(
            scenario,
            tokenizer=tokenizer,
            answers=Answers(
                settings.text, tokenizer, scenario.seed, settings.dataset, settings.tool_call_share
            ),
            lengths=OutputLengths(settings.output_length, scenario.workload, scenario.seed, longest),
            time_scale=time_scale,
            max_record_bytes=settings.max_record_mib * (1 << 20),
            tokens_per_image=settings.image_tokens,
        )
        if settings.cold_start:
            fleet.simulation.start_cold()
        return fleet
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _tokenizer(path: Path | None) -> Tokenizer:
    if path is None:
        return ApproximateTokenizer()
    try:
        from experiments.serve.model_tokenizer import ModelTokenizer  # noqa: PLC0415  (torch, by way of GGUF)
    except ImportError as error:
        raise ConfigError(
            f"serve.tokenizer={path}: needs {error.name}: pip install 'windtunnel[engine]'"
        ) from error
    try:
        return ModelTokenizer.from_path(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"serve.tokenizer={path}: cannot be read: {error}") from error


class FleetServer:
    """The server of a fleet: what it serves, with the features that it attaches to the fleet."""

    def __init__(self, fleet: SimulatedFleet, setup: ServerSetup) -> None:
        self._fleet = fleet
        self._setup = setup
        settings, sleepy, kept_prefills = setup.settings, SleepyFleet(fleet), fleet.simulation.kept_prefills
        backend: Backend = WithoutRemoteKv(sleepy)
        if kept_prefills is not None:
            kept_prefills.lease_s = settings.kv_lease_duration_s
            backend = RemoteKvLayer(sleepy, fleet, kept_prefills)
        self._metrics = FleetMetrics(fleet, settings.served_model_name)
        if settings.expose == "replicas":
            PinnedRequests(fleet)
        if settings.max_waiting is not None:
            WaitingLimit(fleet, settings.max_waiting)
        controls = Controls(fleet, fleet.simulation.clear_prefix_caches, sleepy.mode)
        self.served = Served(backend, self._metrics.serving, controls)

    def of_replica(self, index: int) -> Served:
        """Returns what is served at the port of a replica."""
        backend = SingleReplica(self.served.backend, self._fleet, index)
        return Served(backend, self._metrics.of_replica(index), None)

    def replica_ports(
        self, on_ready: Callable[[int, str], None], api_key: str | None = None, stop: Stop | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Returns the context in which replicas have ports. on_ready: see `replica_ports`."""

        def make(index: int) -> web.Application:
            return make_application(self.of_replica(index), self._setup, api_key, stop)

        return replica_ports(self._fleet, make, self._setup.address, on_ready)


@dataclass(kw_only=True, slots=True)
class FleetSession:
    """A `Session` of a simulated fleet."""

    setup: ServerSetup
    scenario: Scenario
    _ended: tuple[RunRecords, pd.DataFrame, float | None] | None = field(init=False, default=None)
    """The records, the traffic, and when the memory for them was full, after the end."""

    def fleet(self) -> SimulatedFleet:
        """Returns the fleet; its clock does not run yet. Raises ConfigError."""
        return build_fleet(self.scenario, self.setup.settings, self.setup.address.time_scale)

    def publishing(self, fleet: SimulatedFleet) -> AbstractAsyncContextManager[Mapping[int, Publisher]]:
        """Returns the context in which the replicas publish their KV events."""
        from experiments.serve.kv_events.fleet_events import publishing  # noqa: PLC0415 (it needs ZMQ)

        return publishing(fleet, self.setup)

    @asynccontextmanager
    async def running(self, stop: Stop, console: Console) -> AsyncIterator[Served]:
        fleet = self.fleet()
        fleet.driver.start()
        async with AsyncExitStack() as until_end:
            if self.setup.kv_events.publishes:
                await until_end.enter_async_context(self.publishing(fleet))
            server = FleetServer(fleet, self.setup)
            if self.setup.settings.expose == "replicas":
                ports = server.replica_ports(
                    lambda index, url: console.print(f"{url}  (replica {index})", highlight=False),
                    os.environ.get(KEY_VARIABLE),
                    stop,
                )
                await until_end.enter_async_context(ports)
            yield server.served
        fleet.driver.stop()
        if fleet.driver.failure is not None:
            with policy_errors(self.scenario):
                raise fleet.driver.failure
        self._ended = fleet.simulation.close(), fleet.traffic_table(), fleet.records_full_s

    def outcome(self) -> Outcome | None:
        assert self._ended is not None
        records, traffic, full_s = self._ended
        if not len(records.requests):
            return None
        result = self.scenario.result(records, WorkloadNotes())
        if full_s is not None:
            result.summary["notes"].append(full_note(full_s))
        return Outcome(result, traffic)
