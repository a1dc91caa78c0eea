"""Small worlds for exhaustive tests: toy hardware, listed traffic, engines that record their decisions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, cast

from experiments.conformance.recording_core import RecordingCore
from experiments.conformance.toys import TOY, ToyModel
from hwmodels.iterations import Jitter
from policies.adapters.serving import Adapter, AdapterMemory, Registry, Residents
from policies.admission import AdmitAll
from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import BlockPool, KvMemory
from policies.core.endings import Ends
from policies.core.engine import EngineCore
from policies.core.request import Branching, Prompt, Request, Segment
from policies.routing.load_balancing import RoundRobin
from policies.scheduling.fcfs import Fcfs
from sim.cluster.fleet import Fleet
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.cluster.simulation import Simulation
from sim.engine.replica_pool import Links, ReplicaPool
from sim.records.run import RunRecords
from sim.workload.base import Arrival, WorkloadNotes


class Ask(NamedTuple):
    """Request of a world, with its true output length."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    priority: int = 0
    max_tokens: int | None = None
    contents: tuple[tuple[int, int], ...] = ()
    """(content id, tokens) of the parts with which the prompt begins."""
    answer_id: int | None = None
    tenant: str = ""
    deadline_s: float | None = None
    branching: Branching | None = None
    sample_tokens: tuple[int, ...] = ()
    """Output tokens of each branch; empty: all branches end together."""
    adapter: str | None = None
    """LoRA adapter of the request."""


class Traffic:
    """Source of the listed requests, whose ids count from 0.

    In a closed loop, num_users of them arrive at their arrival_s, and each end is followed by the next
    request think_s later.
    """

    def __init__(
        self,
        asks: Sequence[Ask],
        *,
        num_users: int | None = None,
        think_s: float = 0.0,
        patience_s: float | None = None,
    ) -> None:
        self.num_requests: int | None = len(asks)
        self.last_arrival_s: float | None = None
        self.patience_s = patience_s
        self.notes = WorkloadNotes()
        self.ends: list[tuple[int, float, int]] = []
        """(request id, time in seconds, output tokens) of every end that the simulation reported."""
        self._think_s = think_s
        first = list(asks[:num_users])
        self._first = sorted(first, key=lambda ask: ask.arrival_s)
        self._later = list(asks[len(first) :])
        self._num_made = 0

    def arrivals(self) -> Iterator[Arrival]:
        """Yields the requests that do not depend on the end of another."""
        for ask in self._first:
            yield self._make(ask, ask.arrival_s)

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        """Returns the next request of a closed loop, if there is one."""
        self.ends.append((request.request_id, now, num_output_tokens))
        return (self._make(self._later.pop(0), now + self._think_s),) if self._later else ()

    def _make(self, ask: Ask, arrival_s: float) -> Arrival:
        segments = tuple(Segment(*content) for content in ask.contents)
        request = Request(
            self._num_made,
            arrival_s,
            Prompt(ask.num_prompt_tokens, segments),
            ask.max_tokens,
            ask.priority,
            tenant=ask.tenant,
            deadline_s=ask.deadline_s,
            answer_id=ask.answer_id,
            branching=ask.branching,
            adapter=ask.adapter,
        )
        self._num_made += 1
        return Arrival(request, ask.num_output_tokens, ask.sample_tokens)


class WorldRun(NamedTuple):
    """A simulated run: its records, and all its engines including those that were lost in crashes."""

    records: RunRecords
    cores: list[RecordingCore]
    source: Traffic
    fleet: Fleet
    admission: Any


@dataclass(frozen=True, kw_only=True)
class World:
    """Settings of a small run. `simulate` may be called repeatedly: every run starts from the beginning."""

    asks: tuple[Ask, ...]
    batching: Any = field(default_factory=Chunked)
    scheduling: Any = field(default_factory=Fcfs)
    caching: Any = field(default_factory=lambda: Paged(block_size=4))
    prediction: Any = None
    adapters: Any = None
    """Adapters policy; None: requests have no adapters."""
    served: tuple[Adapter, ...] = ()
    """Adapters that requests may name."""
    num_blocks: int = 1000
    num_swap_blocks: int = 0
    links: Callable[[], Links] = Links
    max_num_seqs: int = 8
    max_model_len: int = 4096
    num_replicas: int = 1
    routing: Any = field(default_factory=RoundRobin)
    admission: Any = field(default_factory=AdmitAll)
    model: Any = field(default_factory=lambda: ToyModel(flat=True))
    jitter: Jitter | None = None
    """Random scatter of the iteration times; None: there is none."""
    num_users: int | None = None
    think_s: float = 0.0
    patience_s: float | None = None
    until_s: float | None = None
    frontend_s: float = 0.0
    plans_ahead: bool = False
    recv_interval: int = 1
    signal_age_s: float = 0.05
    engine: Callable[..., Any] = RecordingCore
    """The engine if it does not plan ahead; EngineCore itself records no decisions."""

    def simulate(self, leap: bool = True, report: Callable[[float, int], None] | None = None) -> WorldRun:
        """Simulates the world to its end."""
        cores: list[RecordingCore] = []
        source, cluster = self._source(), self._cluster()
        sim = SimSettings(leap=leap, until_s=self.until_s)
        simulation = Simulation(source=source, pools=self._pools(cores), cluster=cluster, sim=sim)
        records = self._run(simulation, report).in_pandas()
        return WorldRun(records, cores, source, simulation.fleet, cluster.admission)

    def fly(self, leap: bool = True, report: Callable[[float, int], None] | None = None) -> WorldRun:
        """Calls `simulate`; the old name is kept for one version."""
        warnings.warn("World.fly is deprecated: use World.simulate", DeprecationWarning, stacklevel=2)
        return self.simulate(leap, report)

    def _cluster(self) -> ClusterSettings:
        """Returns the cluster settings for one run, from the fields of the same names."""
        given = {each.name: getattr(self, each.name, None) for each in fields(ClusterSettings)}
        return ClusterSettings(
            **{name: value for name, value in given.items() if value is not None}
        ).for_a_run()

    def _run(self, simulation: Simulation, report: Callable[[float, int], None] | None) -> RunRecords:
        return simulation.run(report)

    def _source(self) -> Traffic:
        return Traffic(self.asks, num_users=self.num_users, think_s=self.think_s, patience_s=self.patience_s)

    def _pools(self, cores: list[RecordingCore]) -> list[ReplicaPool]:
        """Returns the pools of replicas; their engines are added to `cores`."""
        return [self._pool(cores, name="a", replicas=self.num_replicas)]

    def _pool(
        self, cores: list[RecordingCore], *, core: Mapping[str, Any] | None = None, **settings: Any
    ) -> ReplicaPool:
        """Returns a pool; `core` and `settings` override the settings of the world."""
        usual = {
            "model": self.model,
            "jitter": self.jitter,
            "frontend_s": self.frontend_s,
            "plans_ahead": self.plans_ahead,
            "recv_interval": self.recv_interval,
            "links": self.links,
            "device": TOY,
        }
        return ReplicaPool(core=partial(self._core, cores, **(core or {})), **usual | settings)

    def _core(
        self, cores: list[RecordingCore], *, num_blocks: int | None = None, **settings: Any
    ) -> EngineCore:
        num_blocks = self.num_blocks if num_blocks is None else num_blocks
        kv_pool = self.caching.pool(KvMemory(num_blocks, 1.0, max_model_len=self.max_model_len))
        usual = {
            "batching": self.batching,
            "scheduling": self.scheduling,
            "max_num_seqs": self.max_num_seqs,
            "max_model_len": self.max_model_len,
            "predictor": self.prediction,
            "num_swap_blocks": self.num_swap_blocks,
        }
        usual["ends"] = Ends.one_step_late if self.plans_ahead else Ends.at_once
        core: Any = self.engine(block_pool=kv_pool, residents=self._residents(kv_pool), **usual | settings)
        if isinstance(core, RecordingCore):
            cores.append(core)
        return cast("EngineCore", core)

    def _residents(self, kv_pool: BlockPool) -> Residents | None:
        """Returns the adapters of an engine; a rank takes as much memory as one token of KV."""
        if self.adapters is None:
            return None
        memory = AdapterMemory(bytes_per_rank=1.0, block_bytes=self.caching.block_size)
        residents: Residents = self.adapters.residents(Registry(self.served, "toy", memory), kv_pool)
        return residents
