"""Worlds in which some replicas compute prompts and others decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hypothesis import strategies as st

from experiments.conformance.adapting import draw_adapters
from experiments.conformance.draws import draw_worlds
from experiments.conformance.policy_draws import draw_batching, draw_routing
from experiments.conformance.recording_core import RecordingCore
from experiments.conformance.worlds import Traffic, World, WorldRun
from policies.batching.disaggregated import DecodeOnly, PrefillOnly
from policies.roles import Fixed
from policies.roles.balance import Balance
from policies.routing.length_aware import LengthAware
from policies.routing.load_balancing import RoundRobin
from sim.cluster.clients import Retries
from sim.cluster.failures import Failures, Scripted
from sim.cluster.settings import SimSettings
from sim.cluster.simulation import Simulation
from sim.engine.replica_pool import Links, ReplicaPool
from sim.records.run import FailureKind
from sim.transfer.kv_transfers import KvTransferSettings
from tests.worlds.clusters import Cluster, draw_recovery, toy_network


@dataclass(frozen=True, kw_only=True)
class Service(Cluster):
    """A world with prefill and decode replicas, and perhaps mixed ones, whose batching is `batching`."""

    num_prefill: int = 1
    num_decode: int = 1
    num_mixed: int = 0
    prefill_batching: Any = field(default_factory=PrefillOnly)
    decode_batching: Any = field(default_factory=DecodeOnly)
    num_prefill_blocks: int | None = None
    """None: as many as others have."""
    decode_routing: Any = field(default_factory=RoundRobin)
    roles: Any = field(default_factory=Fixed)
    kv_transfer: KvTransferSettings = field(default_factory=lambda: KvTransferSettings(transfer="at_end"))
    num_layers: int = 4
    max_resends: int = 1
    links: Callable[[], Links] = field(default_factory=lambda: lambda: Links(bytes_per_token=1.0))

    def simulation(self, leap: bool = True) -> tuple[Simulation, list[RecordingCore], Traffic]:
        """Returns a simulation that has not begun, its engines and its source."""
        cores: list[RecordingCore] = []
        source = self._source()
        simulation = Simulation(
            source=source,
            pools=self._pools(cores),
            cluster=self._cluster(),
            sim=SimSettings(leap=leap, until_s=self.until_s),
        )
        return simulation, cores, source

    def _pools(self, cores: list[RecordingCore]) -> list[ReplicaPool]:
        """Returns one pool for each role that has replicas."""
        batching = {"prefill": self.prefill_batching, "decode": self.decode_batching, "mixed": self.batching}
        counts = {"prefill": self.num_prefill, "decode": self.num_decode, "mixed": self.num_mixed}
        num_blocks = {"prefill": self.num_prefill_blocks}
        return [
            self._pool(
                cores,
                name=role,
                role=role,
                replicas=count,
                num_layers=self.num_layers,
                core={"batching": batching[role], "num_blocks": num_blocks.get(role)},
            )
            for role, count in counts.items()
            if count
        ]

    def simulate(self, leap: bool = True, report: Callable[[float, int], None] | None = None) -> WorldRun:
        """Runs to the end; unless that was cut, all engines must be empty then."""
        simulation, cores, source = self.simulation(leap)
        records = simulation.run(report).in_pandas()
        if self.until_s is None:
            for replica in simulation.replicas:
                replica.core.check_integrity()
                assert not replica.core.unfinished, "a request is left in an engine"
                assert not replica.num_outstanding, "a request is counted that is not there"
                assert not replica.num_outstanding_tokens
                assert not replica.num_queued_tokens
        return WorldRun(records, cores, source, simulation.fleet, None)


@st.composite
def draw_services(draw: st.DrawFn) -> Service:
    """Draws any world cut in two or three pools, with slow networks and caches that release sequences."""
    world = draw(draw_worlds().filter(lambda world: not world.caching.changes_outputs))
    tick_s = world.model.tick_s
    num_prefill, num_decode, num_mixed = (
        draw(st.sampled_from(n)) for n in ([1, 1, 2], [1, 1, 2, 3], [0, 0, 1])
    )
    num_replicas = num_prefill + num_decode + num_mixed
    budget = st.integers(1, 64)
    prefilling = st.builds(PrefillOnly, max_num_batched_tokens=budget) | draw_batching(tick_s)
    balance = st.builds(
        Balance,
        interval_s=st.integers(1, 20).map(lambda n: n * tick_s / 2),
        max_backlog_tokens=st.integers(1, 60),
        max_kv_share=st.sampled_from([0.1, 0.5, 0.9]),
        rest_s=st.integers(0, 20).map(lambda n: n * tick_s),
    )
    network = st.builds(
        toy_network,
        st.sampled_from([0.3, 1.0, 4.0, 1000.0]),
        st.just(tick_s),
        latency_s=st.sampled_from([0.0, 0.5, 1.3]).map(lambda n: n * tick_s),
        fabric_bytes_per_s=st.none() | st.just(2.0 / tick_s),
        max_transfers=st.none() | st.integers(1, 2),
        buffer_gib=st.none() | st.just(20 / 2**30),
    )
    own = {f.name: getattr(world, f.name) for f in fields(World)}
    return Service(
        **own | {"routing": draw(draw_routing(num_replicas, tick_s)), "network": draw(network)},
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_mixed=num_mixed,
        prefill_batching=draw(prefilling),
        decode_batching=draw(st.builds(DecodeOnly, max_num_batched_tokens=budget) | draw_batching(tick_s)),
        num_prefill_blocks=draw(st.none() | st.integers(5, 40)),
        decode_routing=draw(draw_routing(num_replicas, tick_s) | st.builds(LengthAware, heavy_tokens=budget)),
        roles=draw(st.just(Fixed()) | balance),
        kv_transfer=KvTransferSettings(
            transfer=draw(st.sampled_from(["layerwise", "at_end"])),
            first_token_at=draw(st.sampled_from(["prefill", "decode"])),
            overflow_tokens=draw(st.sampled_from([0, 10, 10_000])),
        ),
        num_layers=draw(st.integers(1, 5)),
    )


@st.composite
def draw_failing_services(draw: st.DrawFn) -> Service:
    """Draws any service whose replicas crash, are slow or unreachable, and whose clients try again."""
    service = draw(draw_services())
    tick_s = service.model.tick_s
    num_replicas = service.num_prefill + service.num_decode + service.num_mixed
    ticks = st.integers(0, 120).map(lambda n: n * tick_s / 2)

    def scripted(kind: FailureKind) -> st.SearchStrategy[Scripted]:
        return st.builds(
            Scripted,
            kind=st.just(kind),
            at_s=ticks,
            duration_s=st.integers(1, 60).map(lambda n: n * tick_s / 2),
            replicas=st.integers(0, num_replicas - 1).map(lambda replica: (replica,)),
            factor=st.just(3.0) if kind.has_factor else st.none(),
        )

    crashes = st.lists(scripted(FailureKind.crash), min_size=1, max_size=4)
    others = st.sampled_from([FailureKind.straggler, FailureKind.link_down, FailureKind.link_slow]).flatmap(
        scripted
    )
    retries = st.builds(
        Retries,
        max_attempts=st.integers(1, 3),
        base_s=st.just(tick_s / 2),
        timeout_s=st.none() | st.integers(1, 60).map(lambda n: n * tick_s / 2),
        timeout_until=st.sampled_from(["answer", "first_token"]),
    )
    return replace(
        service,
        failures=Failures(events=(*draw(crashes), *draw(st.lists(others, max_size=3)))),
        retries=draw(retries),
        max_resends=draw(st.integers(0, 2)),
        recovery=draw(draw_recovery()),
    )


@st.composite
def draw_adapter_services(draw: st.DrawFn) -> Service:
    """Draws any service, with or without failures, whose requests name LoRA adapters."""
    return draw_adapters(draw, draw(draw_services() | draw_failing_services()))
