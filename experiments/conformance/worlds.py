"""Worlds small enough to go through everything: toy hardware, listed traffic, engines that keep a diary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hwmodels.devices.device import Device
from hwmodels.devices.interconnect import Link
from hwmodels.iterations.iteration import COMPONENTS
from policies.adapters.registry import Adapter, AdapterMemory, Registry
from policies.adapters.residents import Residents
from policies.admission.none import AdmitAll
from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import BlockPool, KvMemory
from policies.core.branch_set import tokens_in_own_name
from policies.core.engine import EngineCore
from policies.core.limits import Bounds
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.request import Branching, Prompt, Request, Segment
from policies.core.sequence import Sequence as TokenSequence
from policies.routing.round_robin import RoundRobin
from policies.scheduling.fcfs import Fcfs
from sim.cluster.fleet import Fleet
from sim.cluster.recovery import Recovery
from sim.cluster.simulation import Simulation
from sim.cluster.troubles import Troubles
from sim.engine.links import Links
from sim.metrics.slo import Slo
from sim.records.records import RunRecords
from sim.setup.pool import Pool
from sim.transfer.topology import NetworkSettings
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.retries import Retries

TICK_S = 0.125
"""A binary fraction: sums of ticks are exact, so arrivals and iteration boundaries really coincide."""
UNEVEN_S = 0.1 / np.pi
"""Sums are rounded, and depend on the order in which they are formed."""
MAX_PLANS = 20_000
"""After which a run is taken for one that never ends: these worlds take hundreds, or thousands."""


TOY = Device(
    name="toy",
    memory_bytes=1.0,
    memory_bandwidth_bytes_per_s=1.0,
    peak_flops_per_s={"bf16": 1.0},
    num_sms=1,
    l2_bytes=1.0,
    tdp_w=2.0,
    idle_w=1.0,
    pcie=Link(name="PCIe", bandwidth_bytes_per_s=1e9, latency_s=0.0),
    price_usd_per_hour=1.0,
    price_source="none",
    source="none",
)


def toy_network(tokens_per_tick: float, tick_s: float = TICK_S, **settings: Any) -> NetworkSettings:
    """Ports of so many tokens a tick, a token of KV being a byte."""
    usual: dict[str, Any] = {"kind": "infiniband", "latency_s": 0.0, "reached_share": 1.0}
    return NetworkSettings(**(usual | {"bandwidth_bytes_per_s": tokens_per_tick / tick_s} | settings))


class ToyModel:
    """An `IterationModel` of whole ticks: one, one more for 4 tokens, and one more for 32 tokens of context.

    `flat` takes away both: every iteration takes one tick.
    """

    peak_flops_per_s = 1.0
    peak_bytes_per_s = 1.0

    def __init__(self, tick_s: float = TICK_S, flat: bool = False) -> None:
        self.tick_s = tick_s
        self.flat = flat

    def seconds(self, shape: Any) -> Any:
        num_tokens = shape.decode_seqs + shape.prefill_tokens
        num_context = shape.decode_context_tokens + shape.prefill_context_tokens
        if shape.adapters is not None:  # as if ranks were tokens of context
            num_context = num_context + shape.adapters.ranks
        return self.tick_s * (1 + (0 if self.flat else 1) * (num_tokens // 4 + num_context // 32))

    def decode_seconds(self, num_seqs: int, num_context_tokens: int, num_iterations: int) -> list[float]:
        growth = range(num_context_tokens, num_context_tokens + num_seqs * num_iterations, num_seqs)
        more = 0 if self.flat else 1
        return [self.tick_s * (1 + more * (num_seqs // 4 + num_context // 32)) for num_context in growth]

    def breakdown(self, shape: Any) -> dict[str, Any]:
        return dict.fromkeys(COMPONENTS, 0.0) | {"gemm": self.seconds(shape)}

    def flops(self, shape: Any) -> Any:
        return shape.decode_seqs + shape.prefill_tokens

    def bytes_moved(self, shape: Any) -> Any:
        return shape.decode_context_tokens + shape.prefill_context_tokens


class Ask(NamedTuple):
    """One request to come and the truth about it."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    priority: int = 0
    max_tokens: int | None = None
    contents: tuple[tuple[int, int], ...] = ()
    """(content id, tokens) of what the prompt begins with."""
    answer_id: int | None = None
    tenant: str = ""
    deadline_s: float | None = None
    branching: Branching | None = None
    sample_tokens: tuple[int, ...] = ()
    """Output tokens of each branch; empty: all end together."""
    adapter: str | None = None
    """The LoRA adapter that answers it."""


class Traffic:
    """A source that sends the listed requests, ids counting from 0.

    Closed loop: num_users of them at their arrival_s, and each end brings the next, think_s later.
    """

    def __init__(
        self,
        asks: Sequence[Ask],
        *,
        num_users: int | None = None,
        think_s: float = 0.0,
        patience_s: float | None = None,
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        self.num_requests: int | None = len(asks)
        self.last_arrival_s: float | None = None
        self.patience_s = patience_s
        self.notes = WorkloadNotes()
        self.ends: list[tuple[int, float, int]] = []
        """(request id, now, output tokens) as the simulation tells them."""
        self._think_s = think_s
        self._on_end = on_end
        first = list(asks[:num_users])
        self._first = sorted(first, key=lambda ask: ask.arrival_s)
        self._later = list(asks[len(first) :])
        self._num_made = 0

    def arrivals(self) -> Iterator[Arrival]:
        """Those that come by themselves."""
        for ask in self._first:
            yield self._make(ask, ask.arrival_s)

    def follow_up(self, request: Request, now: float, num_output_tokens: int) -> Arrival | None:
        """The next of a closed loop."""
        self.ends.append((request.request_id, now, num_output_tokens))
        if self._on_end is not None:
            self._on_end(len(self.ends))
        return self._make(self._later.pop(0), now + self._think_s) if self._later else None

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


class Decision(NamedTuple):
    """A committed plan: what it was when it was made, and for how many iterations it was run."""

    iteration: int
    start_s: float
    digest: str
    tokens_by_request: dict[int, int]
    admitted: list[int]
    preempted: list[int]
    num_iterations: int


class DiaryCore(EngineCore):
    """Writes every committed plan down, and checks after every plan and commit that no block went astray."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.decisions: list[Decision] = []
        self.arrival_s: dict[int, float] = {}
        """By request id, of those that came here."""
        self.first_admitted: list[int] = []
        """Request ids, in the order in which they first got a slot."""
        self._num_plans = 0

    def add(self, request: Request, stop_after: Any = None, bounds: Bounds | None = None) -> TokenSequence:
        seq = super().add(request, stop_after, bounds)
        self.arrival_s[request.request_id] = request.arrival_s
        return seq

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        self._num_plans += 1
        assert self._num_plans <= MAX_PLANS, f"{MAX_PLANS} plans, and requests are left: they never end"
        if plan is not None:
            self._planned = Decision(
                plan.index,
                now,
                plan.digest(),
                plan.tokens_by_request,
                [seq.request_id for seq in plan.admitted],
                [seq.request_id for seq in plan.preempted],
                0,
            )
            self._check_block_ids(plan)
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        self.decisions.append(self._planned._replace(num_iterations=outcome.iterations))
        progress = super().commit(plan, outcome, now)
        self.check_integrity()
        return progress

    def _start(self, seq: TokenSequence, num_cached: int, num_loaded: int) -> None:
        super()._start(seq, num_cached, num_loaded)
        if not seq.num_preemptions:
            self.first_admitted.append(seq.request_id)

    def _check_block_ids(self, plan: StepPlan) -> None:
        tokens = plan.tokens_by_request
        owners: Counter[int] = Counter()
        num_unasked = 0  # blocks of branches that are computed again
        for seq in self.running.values():
            if tokens_in_own_name(seq) is not None:
                owners.update({number for table in self.branched.block_ids(seq) for number in table})
                continue
            num_unasked += seq._num_apart
            num_tokens = seq.num_held + tokens.get(seq.request_id, 0)
            ids = self.block_ids(seq, num_tokens)
            assert len(ids) == self.pool.blocks_held(seq, num_tokens)
            owners.update(ids)
        assert set(owners) <= set(range(1, self.pool.num_blocks + 1))
        shares = type(self.pool).num_cached is not BlockPool.num_cached  # it finds what others computed
        assert shares or all(count == 1 for count in owners.values()), "a block is owned twice"
        num_unasked += 0 if self.residents is None else self.residents.num_blocks
        assert len(owners) == self.pool.num_used - num_unasked, "a block is leaked"
        for source, target in self.branched.copies(plan):
            assert source in owners, "a copy of a block that nobody owns"
            assert target in owners, "a copy into a block that nobody owns"


class Flown(NamedTuple):
    """A run and what it left in the engines, those that were lost in crashes included."""

    records: RunRecords
    cores: list[DiaryCore]
    source: Traffic
    fleet: Fleet
    admission: Any


@dataclass(frozen=True, kw_only=True)
class WorldPool:
    """Replicas of a kind of their own; what is None is as the world has it."""

    replicas: int = 1
    model: Any = None
    num_blocks: int | None = None
    max_num_seqs: int | None = None
    scaling: Any = None
    cold_start_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class World:
    """All that makes a run. `fly` may be called any number of times: each run starts afresh."""

    asks: tuple[Ask, ...]
    batching: Any = field(default_factory=Chunked)
    scheduling: Any = field(default_factory=Fcfs)
    caching: Any = field(default_factory=lambda: Paged(block_size=4))
    prediction: Any = None
    adapters: Any = None
    """How those of `served` are served; None: they are not."""
    served: tuple[Adapter, ...] = ()
    num_blocks: int = 1000
    num_swap_blocks: int = 0
    links: Callable[[], Links] = Links
    max_num_seqs: int = 8
    max_model_len: int = 4096
    num_replicas: int = 1
    pools: tuple[WorldPool, ...] = ()
    """Called a, b, c ...; none: num_replicas of one kind."""
    routing: Any = field(default_factory=RoundRobin)
    admission: Any = field(default_factory=AdmitAll)
    retries: Retries | None = None
    troubles: Troubles | None = None
    max_resends: int = 0
    recovery: Recovery | None = None
    network: NetworkSettings = field(default_factory=lambda: toy_network(4))
    """For KV that is mirrored."""
    slo: Slo | None = None
    """For autoscalers that look at it."""
    model: Any = field(default_factory=lambda: ToyModel(flat=True))
    num_users: int | None = None
    think_s: float = 0.0
    patience_s: float | None = None
    until_s: float | None = None
    frontend_s: float = 0.0
    plans_ahead: bool = False
    signal_age_s: float = 0.05
    on_end: Callable[[int], None] | None = None
    """Called with the number of requests that have ended, whenever one more has."""
    watch: Callable[[Simulation], None] | None = None
    """Called with every simulation before it runs."""

    def fly(self, leap: bool = True, report: Callable[[float, int], None] | None = None) -> Flown:
        """Run to the end."""
        cores: list[DiaryCore] = []
        source = Traffic(
            self.asks,
            num_users=self.num_users,
            think_s=self.think_s,
            patience_s=self.patience_s,
            on_end=self.on_end,
        )
        admission = deepcopy(self.admission)
        simulation = Simulation(
            source=source,
            pools=self._pools(cores),
            routing=deepcopy(self.routing),
            admission=admission,
            retries=deepcopy(self.retries),
            troubles=self.troubles,
            max_resends=self.max_resends,
            recovery=self.recovery,
            network=self.network,
            slo=self.slo,
            predictor=deepcopy(self.prediction),
            leap=leap,
            until_s=self.until_s,
            signal_age_s=self.signal_age_s,
        )
        if self.watch is not None:
            self.watch(simulation)
        return Flown(simulation.run(report), cores, source, simulation.fleet, admission)

    def _pools(self, cores: list[DiaryCore]) -> list[Pool]:
        """With engines that are noted in `cores`."""
        return [
            Pool(
                name=chr(ord("a") + place),
                core=partial(self._core, pool, cores),
                model=self.model if pool.model is None else pool.model,
                replicas=pool.replicas,
                frontend_s=self.frontend_s,
                plans_ahead=self.plans_ahead,
                links=self.links,
                scaling=deepcopy(pool.scaling),
                cold_start_s=pool.cold_start_s,
                device=TOY,
            )
            for place, pool in enumerate(self.pools or (WorldPool(replicas=self.num_replicas),))
        ]

    def _core(self, pool: WorldPool, cores: list[DiaryCore]) -> DiaryCore:
        num_blocks = self.num_blocks if pool.num_blocks is None else pool.num_blocks
        kv_pool = self.caching.pool(KvMemory(num_blocks, 1.0, max_model_len=self.max_model_len))
        core = DiaryCore(
            batching=deepcopy(self.batching),
            scheduling=deepcopy(self.scheduling),
            pool=kv_pool,
            max_num_seqs=self.max_num_seqs if pool.max_num_seqs is None else pool.max_num_seqs,
            max_model_len=self.max_model_len,
            predictor=deepcopy(self.prediction),
            num_swap_blocks=self.num_swap_blocks,
            residents=self._residents(kv_pool),
        )
        cores.append(core)
        return core

    def _residents(self, kv_pool: BlockPool) -> Residents | None:
        """An engine's adapters; a rank takes as much as a token of KV."""
        if self.adapters is None:
            return None
        memory = AdapterMemory(bytes_per_rank=1.0, block_bytes=self.caching.block_size)
        residents: Residents = self.adapters.residents(Registry(self.served, "toy", memory), kv_pool)
        return residents
