"""Clusters that are textbook queues: an iteration model that turns engines into servers, and their runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies.batching.chunked import Chunked
from policies.batching.static import OneAtATime
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.core.engine import EngineCore
from policies.routing.load_balancing import Random
from policies.scheduling.fcfs import Fcfs
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulation import Simulation
from sim.engine.replica_pool import ReplicaPool
from sim.records.run import RunRecords
from sim.workload.arrivals import Poisson
from sim.workload.distributions import Distribution, Fixed, Geometric, Lengths
from sim.workload.synthetic import Synthetic

PROMPT_TOKENS = 1000
"""Mean size where a request is a prompt ..."""
OUTPUT_TOKENS = 100
"""... and where it is an answer. An iteration a token: more would be closer to the limit, and take longer."""
MANY = 2**24
"""Tokens of context and of a step, KV blocks: no limit is ever met."""


class QueueModel:
    """An `IterationModel`: seconds an iteration, a sequence in it and a prompt token in it."""

    peak_flops_per_s = peak_bytes_per_s = 1.0

    def __init__(self, *, iteration_s: float = 0.0, sequence_s: float = 0.0, prompt_token_s: float = 0.0):
        self.iteration_s, self.sequence_s, self.prompt_token_s = iteration_s, sequence_s, prompt_token_s

    def seconds(self, shape: Any) -> Any:
        num_seqs = shape.decode_seqs + shape.prefill_seqs
        prompts_s = self.prompt_token_s * shape.prefill_tokens
        return self.iteration_s + self.sequence_s * num_seqs + prompts_s

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        iteration_s = self.iteration_s + self.sequence_s * num_seqs
        return list(accumulate(repeat(iteration_s, num_iterations), initial=start_s))[1:]


@dataclass(frozen=True, kw_only=True)
class Server:
    """One replica: the price of its iterations, its batching, and the part of a request that is its size."""

    model: QueueModel
    batching: Any
    num_slots: int
    size_is: str
    mean_tokens: int
    work: str | None = None
    """Column of the iterations: how many servers one keeps busy; None: one."""

    def lengths(self, sizes: Distribution) -> Lengths:
        given = {"prompt_tokens": Fixed(value=1), "output_tokens": Fixed(value=1), self.size_is: sizes}
        return Lengths(**given)


ONE_SERVER = Server(
    model=QueueModel(prompt_token_s=1 / PROMPT_TOKENS),
    batching=OneAtATime(max_num_batched_tokens=MANY),
    num_slots=1,
    size_is="prompt_tokens",
    mean_tokens=PROMPT_TOKENS,
)
SHARED = Server(
    model=QueueModel(sequence_s=1 / OUTPUT_TOKENS),
    batching=Chunked(),
    num_slots=1000,
    size_is="output_tokens",
    mean_tokens=OUTPUT_TOKENS,
)


def servers(num_slots: int) -> Server:
    return Server(
        model=QueueModel(iteration_s=1 / OUTPUT_TOKENS),
        batching=Chunked(),
        num_slots=num_slots,
        size_is="output_tokens",
        mean_tokens=OUTPUT_TOKENS,
        work="running",
    )


@dataclass(frozen=True, kw_only=True)
class Shares:
    """A weighted random router, which is not shipped: the arrivals of each replica stay Poisson."""

    shares: tuple[float, ...]

    def choose(self, request: Any, replicas: Any, now: float) -> int:
        coin = np.random.default_rng((7, request.request_id)).random()
        return int(np.searchsorted(np.cumsum(self.shares)[:-1], coin, side="right"))


@dataclass(frozen=True, kw_only=True)
class Queue:
    """A cluster. rate_per_s: of all arrivals. sizes: in tokens; None: geometric, exponential to a token."""

    server: Server
    rate_per_s: float
    sizes: Distribution | None = None
    routing: Any = field(default_factory=Random)
    num_replicas: int = 1

    @property
    def second_moment(self) -> float:
        """Second moment of the size in s^2, for a mean of 1 s; the rounding of lognormal sizes is ignored."""
        if self.sizes is None:
            return 2 - 1 / self.server.mean_tokens
        return 1 + getattr(self.sizes, "cv", 0.0) ** 2

    @property
    def num_servers(self) -> int:
        return self.num_replicas * (self.server.num_slots if self.server.work else 1)

    @property
    def load(self) -> float:
        """Share of their time for which servers are busy: rho."""
        return self.rate_per_s / self.num_servers


class Watched:
    """A router that delegates to another, and integrates the replicas' outstanding requests over time."""

    def __init__(self, routing: Any) -> None:
        self._routing = routing
        self._replicas: Any = ()
        self._last_s = 0.0
        self.request_s = 0.0

    def choose(self, request: Any, replicas: Any, now: float) -> int:
        self._replicas = replicas
        self._add(now, num_gone=0)
        return self._routing.choose(request, replicas, now)

    def on_end(self, request: Any, now: float) -> None:
        self._add(now, num_gone=1)

    def _add(self, now: float, num_gone: int) -> None:
        if now > self._last_s:
            num_present = num_gone + sum([replica.num_outstanding for replica in self._replicas])
            self.request_s += num_present * (now - self._last_s)
            self._last_s = now


def simulate(queue: Queue, num_requests: int, seed: int) -> tuple[RunRecords, Watched]:
    """Simulates one run; the only place that knows how a simulation is assembled."""
    server = queue.server
    sizes = queue.sizes or Geometric(mean=server.mean_tokens)
    workload = Synthetic(
        arrivals=Poisson(rate_per_s=queue.rate_per_s),
        lengths=server.lengths(sizes),
        num_requests=num_requests,
    )

    def core() -> EngineCore:
        return EngineCore(
            batching=server.batching,
            scheduling=Fcfs(),
            block_pool=Paged().pool(KvMemory(MANY)),
            max_num_seqs=server.num_slots,
            max_model_len=MANY,
        )

    watched = Watched(queue.routing)
    simulation = Simulation(
        source=workload.source(seed=seed, max_model_len=MANY),
        pools=[ReplicaPool(core=core, model=server.model, replicas=queue.num_replicas)],
        cluster=ClusterSettings(routing=watched, signal_age_s=0.0),
    )
    return simulation.run().in_pandas(), watched


def simulate_queue(queue: Queue, num_requests: int, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Simulates a queue, checks its laws, and returns (requests, iterations); sizes and waits are in s.

    Little's law without an average: the integral of the requests present is the sum of their sojourns. Work
    is conserved: servers are busy for as long as all requests together are large.
    """
    records, watched = simulate(queue, num_requests, seed)
    server, requests, iterations = queue.server, records.requests, records.iterations
    assert (requests.status == "finished").all()
    requests["size_s"] = requests[server.size_is] / server.mean_tokens
    requests["wait_s"] = requests.scheduled_s - requests.arrival_s
    requests["sojourn_s"] = requests.finished_s - requests.arrival_s
    assert watched.request_s == pytest.approx(requests.sojourn_s.sum(), rel=1e-9)
    iterations["num_busy"] = iterations[server.work] if server.work else 1
    busy_s = (iterations.duration_s * iterations.num_busy).sum()
    assert busy_s == pytest.approx(requests.size_s.sum(), rel=1e-9)
    return requests, iterations
