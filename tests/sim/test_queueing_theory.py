"""Clusters that are textbook queues: mean sojourn, wait and busy share against queueing theory.

An iteration model made for the purpose turns engines with real policies into servers of a mean service time
of 1 s. A request's size is its length in tokens:

    one server          one prompt after the other, each in one iteration of 1 ms a token
    k servers           k slots; an iteration takes 1/200 s however many sequences it decodes
    processor sharing   an iteration takes 1/200 s for each of its sequences

So sizes are whole tokens, and sequences that share an iteration begin and end it together. Beside a textbook
value stands, where one is known, the exact value of the queue that is really simulated.

Method: independent replications, begun empty; the first and the last requests of each are left out. A mean
over replications has the interval of a regression on control variates, figures of the same traffic whose
expectation is known (Lavenberg and Welch, Management Science 27, 1981). All of the 99 % interval has to lie
within a share of the textbook value, 2 % in the full version. Besides, an interval twice as wide has to hold
the exact value: chance alone fails that less than once in 10,000 times, an error of 2 % always.

Sources: Kleinrock, Queueing Systems I (1975) and II (1976); Harchol-Balter, Performance Modeling and Design
of Computer Systems (2013); Mitzenmacher, IEEE TPDS 12 (2001).

Above 400 lines, as the queues, the theory and the statistics are needed together.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from numpy.typing import ArrayLike, NDArray
from scipy import linalg, optimize, stats

from policies.batching.chunked import Chunked
from policies.batching.one_at_a_time import OneAtATime
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.engine import EngineCore
from policies.routing.least_outstanding import LeastOutstanding
from policies.routing.power_of_two import PowerOfTwo
from policies.routing.random import Random
from policies.routing.round_robin import RoundRobin
from policies.routing.weighted import Weighted
from policies.scheduling.fcfs import Fcfs
from sim.metrics.paired import Outcome, compare_paired
from sim.records import RunRecords
from sim.simulation import Simulation
from sim.workload.arrivals import Poisson
from sim.workload.distributions import Distribution, Fixed, Geometric, Lognormal
from sim.workload.lengths import Lengths
from sim.workload.synthetic import Synthetic

PROMPT_TOKENS = 1000
"""Mean size where a request is a prompt ..."""
OUTPUT_TOKENS = 200
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

    def decode_seconds(self, num_seqs: int, num_context_tokens: int, num_iterations: int) -> list[float]:
        return [self.iteration_s + self.sequence_s * num_seqs] * num_iterations


@dataclass(frozen=True, kw_only=True)
class Server:
    """What one replica is: how its iterations are priced and filled, and what of a request is its size."""

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
    """A coin with weights, which no shipped router is: the arrivals of each replica stay Poisson."""

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
        """Of the size in seconds, whose mean is 1; a rounding of lognormal sizes is left out."""
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
    """A router that asks another, and integrates over time the requests that the replicas say they have."""

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
    """One run; the only place that knows how a simulation is put together."""
    server = queue.server
    sizes = queue.sizes or Geometric(mean=server.mean_tokens)
    workload = Synthetic(
        arrivals=Poisson(rate_per_s=queue.rate_per_s),
        lengths=server.lengths(sizes),
        num_requests=num_requests,
    )
    cores = [
        EngineCore(
            batching=server.batching,
            scheduling=Fcfs(),
            pool=Paged().pool(KvMemory(MANY)),
            max_num_seqs=server.num_slots,
            max_model_len=MANY,
        )
        for _ in range(queue.num_replicas)
    ]
    watched = Watched(queue.routing)
    simulation = Simulation(
        source=workload.source(seed=seed, max_model_len=MANY),
        cores=cores,
        model=server.model,
        routing=watched,
        signal_age_s=0.0,
    )
    return simulation.run(), watched


def fly(queue: Queue, num_requests: int, seed: int) -> tuple[pd.DataFrame, float]:
    """(requests with their size, wait and sojourn in seconds, busy share) of a run that obeys the laws.

    Little's law without an average: the integral of the requests present is the sum of their sojourns.
    Work is conserved: servers are busy for as long as all requests together are large.
    """
    records, watched = simulate(queue, num_requests, seed)
    server, requests, iterations = queue.server, records.requests, records.iterations
    assert (requests.status == "finished").all()
    requests["size_s"] = requests[server.size_is] / server.mean_tokens
    requests["wait_s"] = requests.scheduled_s - requests.arrival_s
    requests["sojourn_s"] = requests.finished_s - requests.arrival_s
    assert watched.request_s == pytest.approx(requests.sojourn_s.sum(), rel=1e-9)
    busy = iterations[server.work] if server.work else 1
    busy_s = (iterations.duration_s * busy).sum()
    assert busy_s == pytest.approx(requests.size_s.sum(), rel=1e-9)
    return requests, busy_s / records.end_s / queue.num_servers


class Effort(NamedTuple):
    """How much is simulated, and how close to the textbook value all of an interval has to be."""

    num_requests: int
    num_left_out: int  # at the beginning, and at the end ...
    left_out_s: float  # ... or for so long, if these are more
    max_rel: float

    def means_of(self, queue: Queue, num_runs: int) -> pd.DataFrame:
        """One row a replication: its means by name, and the control variates."""
        num_left_out = max(self.num_left_out, int(self.left_out_s * queue.rate_per_s))
        return pd.DataFrame(
            means_of_run(queue, self.num_requests, num_left_out, first_seed(queue) + run)
            for run in range(num_runs)
        )


QUICK = Effort(1000, 100, 5.0, 0.3)
FULL = Effort(12_500, 500, 15.0, 0.02)
QUICK_RUNS = 8


def first_seed(queue: Queue) -> int:
    """Every queue has traffic of its own, or one odd draw would show in all of them."""
    return zlib.crc32(repr((queue.load, queue.num_servers, queue.sizes, queue.routing)).encode())


def means_of_run(queue: Queue, num_requests: int, num_left_out: int, seed: int) -> dict[str, float]:
    """Means over the requests in the middle of a run.

    Control variates: mean size against mean gap; and the mean wait that the same traffic would have at one
    server as fast as all together, against Pollaczek and Khinchine.
    """
    requests, busy_share = fly(queue, num_requests, seed)
    middle = slice(num_left_out, -num_left_out)
    kept = requests.iloc[middle]
    gap_s = np.diff(kept.arrival_s).mean()
    fast_wait_s = lindley_wait_s(requests.arrival_s, requests.size_s / queue.num_servers)[middle].mean()
    means = {
        "load control": kept.size_s.mean() - gap_s * queue.rate_per_s,
        "wait control": fast_wait_s - mg1_wait_s(queue.load, queue.second_moment) / queue.num_servers,
        "busy share": busy_share,
        "sojourn": kept.sojourn_s.mean(),
        "wait": kept.wait_s.mean(),
    }
    for replica, rows in kept.groupby("replica"):
        means[f"sojourn at {replica}"] = rows.sojourn_s.mean()
    is_small = kept.size_s < 1
    for name, rows in (("small", kept[is_small]), ("large", kept[~is_small])):
        means[f"slowdown of {name}"] = rows.sojourn_s.sum() / rows.size_s.sum() if len(rows) else np.nan
    return means


class Mean(NamedTuple):
    """An estimate and half the width of its 99 % confidence interval."""

    value: float
    half_width: float


def regressed_mean(values: ArrayLike, controls: ArrayLike) -> Mean:
    """The mean of values [R] by least squares on controls [R, C] of mean 0: what the plane says at 0."""
    y = np.asarray(values, dtype=np.float64)
    design = np.column_stack([np.ones(len(y)), controls])
    coefficients, residues, rank, _ = linalg.lstsq(design, y)
    freedom = len(y) - rank
    variance = linalg.inv(design.T @ design)[0, 0] * residues / freedom
    return Mean(float(coefficients[0]), float(stats.t.ppf(0.995, freedom) * np.sqrt(variance)))


def lindley_wait_s(arrival_s: ArrayLike, size_s: ArrayLike) -> NDArray[np.float64]:
    """Waits at one server, first come, first served: the next is max(0, this one + size - gap)."""
    walk_s = np.cumsum(np.concatenate([[0.0], np.asarray(size_s)[:-1] - np.diff(arrival_s)]))
    return walk_s - np.minimum.accumulate(walk_s)


def mg1_wait_s(load: float, second_moment: float) -> float:
    """Mean wait at one server with sizes of mean 1 s: Pollaczek and Khinchine."""
    return load * second_moment / 2 / (1 - load)


def erlang_c(num_servers: int, load: float) -> float:
    """Share of the requests that have to wait in M/M/k."""
    offered, blocked = load * num_servers, 1.0
    for servers in range(1, num_servers + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    return blocked / (1 - load * (1 - blocked))


def mmk_wait_s(num_servers: int, load: float) -> float:
    """Mean wait in M/M/k, sizes of mean 1 s."""
    return erlang_c(num_servers, load) / num_servers / (1 - load)


def stationary(transitions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of the states of a chain, from its transition probabilities or rates [N, N]."""
    balance = (transitions - np.diag(transitions.sum(axis=1))).T
    balance[0] = 1.0
    return linalg.solve(balance, np.eye(len(balance))[0])


def in_step_sojourn_s(
    rate_per_s: float,
    served: Callable[[int], int],
    iteration_s: Callable[[int], float],
    mean_tokens: int = OUTPUT_TOKENS,
    max_present: int = 150,
) -> float:
    """Mean sojourn where served(n) of n requests get a token each in an iteration that takes iteration_s(n).

    Exact for Poisson arrivals and geometric sizes. Of those served, each ends with the iteration with chance
    1 / mean_tokens; who comes meanwhile waits for the next one, who comes to an idle engine begins at once.
    The Markov chain of the requests present when iterations begin gives their mean over time, and that, by
    Little, the sojourn.
    """
    present = np.arange(max_present)
    lasts_s = np.array([iteration_s(n) if n else 1 / rate_per_s for n in present])
    chain = np.zeros((max_present, max_present))
    chain[0, 1] = 1.0
    for n in present[1:]:
        ended = stats.binom.pmf(np.arange(served(n) + 1), served(n), 1 / mean_tokens)
        come = stats.poisson.pmf(present, rate_per_s * lasts_s[n])
        after = np.convolve(ended[::-1], come)[: max_present - n + served(n)]
        chain[n, n - served(n) : n - served(n) + len(after)] = after
    share = stationary(chain)
    request_s = present * lasts_s + np.where(present > 0, rate_per_s * lasts_s**2 / 2, 0.0)
    return float(share @ request_s / (share @ lasts_s) / rate_per_s)


def cyclic_sojourn_s(rate_per_s: float, turns: tuple[int, ...], max_present: int = 120) -> float:
    """Mean sojourn at an exponential server that gets the arrivals of a Poisson stream whose turn is 1.

    turns repeat: (1, 0, 0) is every third arrival, E3/M/1. A Markov chain of (turn, requests present).
    """
    num_turns = len(turns)
    rates = np.zeros((num_turns, max_present, num_turns, max_present))
    for turn, is_mine in enumerate(turns):
        for present in range(max_present):
            after = min(present + is_mine, max_present - 1)
            rates[turn, present, (turn + 1) % num_turns, after] += rate_per_s
            if present:
                rates[turn, present, turn, present - 1] += 1.0
    share = stationary(rates.reshape(num_turns * max_present, -1)).reshape(num_turns, max_present)
    return float(share.sum(axis=0) @ np.arange(max_present)) / (rate_per_s * sum(turns) / num_turns)


def shorter_of_two_sojourn_s(rate_per_s: float, max_present: int = 40) -> float:
    """Mean sojourn at two exponential servers, arrivals joining the shorter queue: a Markov chain."""
    rates = np.zeros((max_present,) * 4)
    for a, b in np.ndindex(max_present, max_present):
        to_a = 0.5 if a == b else float(a < b)
        rates[a, b, min(a + 1, max_present - 1), b] += rate_per_s * to_a
        rates[a, b, a, min(b + 1, max_present - 1)] += rate_per_s * (1 - to_a)
        if a:
            rates[a, b, a - 1, b] += 1.0
        if b:
            rates[a, b, a, b - 1] += 1.0
    share = stationary(rates.reshape(max_present**2, -1)).reshape(max_present, max_present)
    return float(2 * share.sum(axis=1) @ np.arange(max_present)) / rate_per_s


def mean_field_sojourn_s(load: float, num_choices: int) -> float:
    """Mean sojourn when each joins the shortest of d of infinitely many: sum of rho^((d^i - d) / (d - 1))."""
    d = num_choices
    return float(sum(load ** ((d**i - d) // (d - 1)) for i in range(1, 12)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A queue and what is known of it, by the names of `means_of_run`."""

    queue: Queue
    textbook: Mapping[str, float]
    exact: Mapping[str, float] = field(default_factory=dict)
    controls: tuple[str, ...] = ("load control", "wait control")
    num_runs: int = 40


BY_LOAD = ("load control",)
"""Where the other control is the very figure that is asked for, or has nothing to do with it."""


def one_server(load: float, sizes: Distribution | None, textbook_second_moment: float, num_runs: int) -> Case:
    queue = Queue(server=ONE_SERVER, rate_per_s=load, sizes=sizes)
    wait_s, exact_s = mg1_wait_s(load, textbook_second_moment), mg1_wait_s(load, queue.second_moment)
    return Case(
        queue=queue,
        textbook={"sojourn": 1 + wait_s, "wait": wait_s, "busy share": load},
        exact={"sojourn": 1 + exact_s, "wait": exact_s, "busy share": load},
        controls=BY_LOAD,
        num_runs=num_runs,
    )


def many_servers(num_servers: int, load: float) -> Case:
    rate_per_s, wait_s = load * num_servers, mmk_wait_s(num_servers, load)
    exact_s = in_step_sojourn_s(rate_per_s, lambda n: min(n, num_servers), lambda n: 1 / OUTPUT_TOKENS)
    return Case(
        queue=Queue(server=servers(num_servers), rate_per_s=rate_per_s),
        textbook={"sojourn": 1 + wait_s, "wait": wait_s, "busy share": load},
        exact={"sojourn": exact_s, "wait": exact_s - 1, "busy share": load},
    )


def shared(load: float, sizes: Distribution | None = None) -> Case:
    sojourn_s = 1 / (1 - load)
    classes = ("slowdown of large",) if sizes else ("slowdown of small", "slowdown of large")
    exact = {} if sizes else {"sojourn": in_step_sojourn_s(load, lambda n: n, lambda n: n / OUTPUT_TOKENS)}
    return Case(
        queue=Queue(server=SHARED, rate_per_s=load, sizes=sizes),
        textbook={"sojourn": sojourn_s, "busy share": load, **dict.fromkeys(classes, sojourn_s)},
        exact=exact,
        num_runs=20,
    )


def cluster(
    routing: Any, num_replicas: int, load: float, sojourn_s: float | Mapping[str, float], **given: Any
) -> Case:
    known = {"sojourn": sojourn_s} if isinstance(sojourn_s, float) else sojourn_s
    return Case(
        queue=Queue(
            server=ONE_SERVER, rate_per_s=load * num_replicas, routing=routing, num_replicas=num_replicas
        ),
        textbook={**known, "busy share": load},
        **({"exact": known} | given),
    )


CASES = {
    "M/M/1": one_server(0.5, None, 2.0, num_runs=80),
    "M/D/1": one_server(0.5, Fixed(value=PROMPT_TOKENS), 1.0, num_runs=80),
    "M/G/1 lognormal": one_server(0.5, Lognormal(mean=PROMPT_TOKENS, cv=0.7), 1.49, num_runs=80),
    "M/M/2": many_servers(2, 0.6),
    "M/M/4": many_servers(4, 0.8),
    "M/M/1-PS": shared(0.6),
    "M/D/1-PS": shared(0.6, Fixed(value=OUTPUT_TOKENS)),
    "random": cluster(Random(), 3, 0.5, 2.0, controls=BY_LOAD),
    "unequal shares": cluster(
        Shares(shares=(0.6, 0.4)),
        2,
        0.5,
        {"sojourn at 0": 1 / (1 - 0.6), "sojourn at 1": 1 / (1 - 0.4)},
        controls=BY_LOAD,
        num_runs=80,
    ),
    "round robin": cluster(RoundRobin(), 3, 0.6, cyclic_sojourn_s(1.8, (1, 0, 0)), controls=BY_LOAD),
    "weighted 2:1": cluster(
        Weighted(weights=(2.0, 1.0)),
        2,
        0.4,
        {"sojourn at 0": cyclic_sojourn_s(0.8, (1, 1, 0)), "sojourn at 1": cyclic_sojourn_s(0.8, (0, 0, 1))},
        controls=BY_LOAD,
    ),
    "shorter of two": cluster(LeastOutstanding(), 2, 0.7, shorter_of_two_sojourn_s(1.4)),
    "both of two": cluster(PowerOfTwo(), 2, 0.7, shorter_of_two_sojourn_s(1.4)),
    "two of 200": cluster(PowerOfTwo(), 200, 0.7, mean_field_sojourn_s(0.7, 2), exact={}),
}
NOT_QUICK = {"M/M/4", "unequal shares", "two of 200"}
"""Whose intervals say little after 8 x 1,000 requests."""


def assert_agrees(case: Case, effort: Effort, num_runs: int, name: str = "") -> None:
    means = effort.means_of(case.queue, num_runs)
    far = []
    for quantity, expected in case.textbook.items():
        value, half_width = regressed_mean(means[quantity], means[list(case.controls)])
        line = (
            f"{name:16} {quantity:18} {value:8.4f} +- {half_width / expected:6.2%}  "
            f"textbook {expected:8.4f} {value / expected - 1:+7.2%}  "
            f"exact {case.exact.get(quantity, np.nan):8.4f}"
        )
        print(line)
        is_close = abs(value - expected) + half_width <= effort.max_rel * expected
        if not is_close or abs(value - case.exact.get(quantity, value)) > 2 * half_width:
            far.append(line)
    assert not far, "\n".join(["", *far])


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_QUICK])
def test_a_short_run_is_near_queueing_theory(name):
    assert_agrees(CASES[name], QUICK, QUICK_RUNS, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_99_percent_interval_lies_within_2_percent_of_theory(name):
    assert_agrees(CASES[name], FULL, CASES[name].num_runs, name)


@pytest.mark.parametrize(
    "routing", [Random(), RoundRobin(), LeastOutstanding()], ids=lambda r: type(r).__name__
)
def test_every_request_waits_as_long_as_lindley_says(routing):
    queue = Queue(server=ONE_SERVER, rate_per_s=2.4, routing=routing, num_replicas=3)
    requests, _ = fly(queue, 3000, seed=1)
    for _, rows in requests.groupby("replica"):
        assert len(rows) > 800
        np.testing.assert_allclose(rows.wait_s, lindley_wait_s(rows.arrival_s, rows.size_s), atol=1e-9)
        np.testing.assert_allclose(rows.sojourn_s, rows.wait_s + rows.size_s, atol=1e-9)


def test_the_more_a_router_knows_the_shorter_the_sojourn():
    """Random, then in turns, then the shorter of two, then the shortest of all, on the same traffic."""
    routings = [Random(), RoundRobin(), PowerOfTwo(), LeastOutstanding()]
    sojourns_s = []
    for routing in routings:
        queue = Queue(server=ONE_SERVER, rate_per_s=8.0, routing=routing, num_replicas=10)
        sojourns_s.append([means_of_run(queue, 2000, 300, seed)["sojourn"] for seed in range(4)])
    for worse, better in pairwise(sojourns_s):
        assert compare_paired(better, worse).outcome("lower") is Outcome.BETTER


def test_whole_tokens_and_common_iterations_move_no_mean_by_a_third_of_a_percent():
    for case in CASES.values():
        for quantity, exact in case.exact.items():
            assert exact == pytest.approx(case.textbook[quantity], rel=0.003)


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_erlang_c_of_one_and_two_servers(load):
    """rho, and 2 rho^2 / (1 + rho); the mean wait of one server is that of M/M/1."""
    assert erlang_c(1, load) == pytest.approx(load)
    assert erlang_c(2, load) == pytest.approx(2 * load**2 / (1 + load))
    assert mmk_wait_s(1, load) == pytest.approx(mg1_wait_s(load, 2.0))


@pytest.mark.parametrize("num_servers", [1, 3])
def test_servers_in_step_approach_mmk_as_tokens_become_short(num_servers):
    """Each halving of the token halves the distance."""
    off = [
        in_step_sojourn_s(0.6 * num_servers, lambda n: min(n, num_servers), lambda n, m=m: 1 / m, m)
        - (1 + mmk_wait_s(num_servers, 0.6))
        for m in (100, 200, 400)
    ]
    assert off[0] / off[1] == pytest.approx(2, rel=0.02)
    assert off[1] / off[2] == pytest.approx(2, rel=0.02)


def test_every_third_arrival_makes_e3_m_1():
    """Its sojourn is 1 / (1 - s) with s = (3 rate / (3 rate + 1 - s))^3 at `rate` arrivals a second."""
    root = optimize.brentq(lambda s: (1.8 / (1.8 + 1 - s)) ** 3 - s, 0.0, 0.99)
    assert cyclic_sojourn_s(1.8, (1, 0, 0)) == pytest.approx(1 / (1 - root))
    assert cyclic_sojourn_s(0.6, (1,)) == pytest.approx(2.5)


def test_the_shorter_of_two_lies_between_one_queue_for_both_and_two_apart():
    assert 1 + mmk_wait_s(2, 0.7) < shorter_of_two_sojourn_s(1.4) < cyclic_sojourn_s(1.4, (1, 0))


def test_mitzenmachers_table():
    """TPDS 2001, table 1: the prediction for two choices."""
    table = {0.5: 1.2657, 0.7: 1.6145, 0.9: 2.6141, 0.99: 5.4320}
    for load, sojourn_s in table.items():
        assert mean_field_sojourn_s(load, 2) == pytest.approx(sojourn_s, abs=1e-4)
