"""Clusters that are textbook queues: mean sojourn, wait and busy share against queueing theory.

An iteration model made for the purpose turns engines with real policies into servers of a mean service time
of 1 s. A request's size is its length in tokens:

    one server          one prompt after the other, each in one iteration of 1 ms a token
    k servers           k slots; an iteration takes 1/100 s however many sequences it decodes
    processor sharing   an iteration takes 1/100 s for each of its sequences

So sizes are whole tokens, and sequences that share an iteration begin and end it together. Beside a textbook
value stands, where one is known, the exact value of the queue that is really simulated.

Method: independent replications, begun empty; the first and the last requests of each are left out. A mean
over replications has the interval of a regression on control variates, figures of the same traffic whose
expectation is known (Lavenberg and Welch, Management Science 27, 1981). All of the 99 % interval has to lie
within a share of the textbook value, 2 % in the full version. Besides, an interval twice as wide has to hold
the exact value, which chance alone fails less than once in 10,000 times.

The theory is in queueing_formulas.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from numpy.typing import ArrayLike
from scipy import linalg, stats

from policies.routing.load_balancing import LeastOutstanding, PowerOfTwo, Random, RoundRobin, Weighted
from sim.metrics.confidence import Outcome, compare_paired
from sim.workload.distributions import Distribution, Fixed, Lognormal
from tests.sim.theory.queueing_formulas import (
    cyclic_sojourn_s,
    in_step_sojourn_s,
    lindley_wait_s,
    mean_field_sojourn_s,
    mg1_wait_s,
    mmk_wait_s,
    shorter_of_two_sojourn_s,
)
from tests.sim.theory.queues import (
    ONE_SERVER,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SHARED,
    Queue,
    Shares,
    servers,
    simulate_queue,
)


class Effort(NamedTuple):
    """The extent of a simulation, and the largest distance of an interval from the textbook value."""

    num_requests: int
    num_left_out: int  # at the beginning, and at the end ...
    left_out_s: float  # ... or for so long, if these are more
    max_rel: float

    def means_of(self, queue: Queue, num_runs: int) -> pd.DataFrame:
        """Returns one row per replication: its means by name, and the control variates."""
        num_left_out = max(self.num_left_out, int(self.left_out_s * queue.rate_per_s))
        return pd.DataFrame(
            means_of_run(queue, self.num_requests, num_left_out, first_seed(queue) + run)
            for run in range(num_runs)
        )


QUICK = Effort(700, 70, 0.0, 0.15)
FULL = Effort(6_000, 400, 10.0, 0.02)
QUICK_RUNS = 12


def first_seed(queue: Queue) -> int:
    """Returns a seed of the queue's own; with shared traffic one odd draw would show in all queues."""
    return zlib.crc32(repr((queue.load, queue.num_servers, queue.sizes, queue.routing)).encode())


SPEED = 1.25
"""Of the servers that a replica's waits are controlled with: alike, but not the same."""


def means_of_run(queue: Queue, num_requests: int, num_left_out: int, seed: int) -> dict[str, float]:
    """Means over the requests in the middle of a run.

    For control: the mean size less what the mean gap allows for; the mean waits that the same traffic would
    have, by Lindley's recursion, at one server as fast as all together, and at faster replicas.
    """
    requests, iterations = simulate_queue(queue, num_requests, seed)
    kept = requests.iloc[num_left_out:-num_left_out]
    begin_s, end_s = kept.arrival_s.iloc[0], kept.arrival_s.iloc[-1]
    ends_s = iterations.start_s + iterations.duration_s
    inside_s = ends_s.clip(begin_s, end_s) - iterations.start_s.clip(begin_s, end_s)
    means = {
        "excess size": kept.size_s.mean() - (end_s - begin_s) / (len(kept) - 1) * queue.rate_per_s,
        "pooled wait": wait_at_speed_s(requests, queue.num_servers)[kept.index].mean(),
        "busy share": (inside_s @ iterations.num_busy) / (end_s - begin_s) / queue.num_servers,
        "sojourn": kept.sojourn_s.mean(),
        "wait": kept.wait_s.mean(),
    }
    for replica, rows in requests.groupby("replica"):
        mine = rows.index.intersection(kept.index)
        means[f"sojourn at {replica}"] = rows.sojourn_s[mine].mean()
        means[f"fast wait at {replica}"] = wait_at_speed_s(rows, SPEED)[mine].mean()
    is_small = kept.size_s < 1
    for name, rows in (("small", kept[is_small]), ("large", kept[~is_small])):
        means[f"slowdown of {name}"] = rows.sojourn_s.sum() / rows.size_s.sum() if len(rows) else np.nan
    return means


def wait_at_speed_s(requests: pd.DataFrame, speed: float) -> pd.Series:
    wait_s = lindley_wait_s(requests.arrival_s, requests.size_s / speed)
    return pd.Series(wait_s, index=requests.index)


class Mean(NamedTuple):
    """An estimate and half the width of its 99 % confidence interval."""

    value: float
    half_width: float


def regressed_mean(values: ArrayLike, controls: ArrayLike) -> Mean:
    """Computes the mean of values [R] by least squares on controls [R, C] of mean 0: the fit's value at 0."""
    y = np.asarray(values, dtype=np.float64)
    design = np.column_stack([np.ones(len(y)), controls])
    coefficients, residues, rank, _ = linalg.lstsq(design, y)
    freedom = len(y) - rank
    variance = linalg.inv(design.T @ design)[0, 0] * residues / freedom
    return Mean(float(coefficients[0]), float(stats.t.ppf(0.995, freedom) * np.sqrt(variance)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A queue and what is known of it, by the names of `means_of_run`."""

    queue: Queue
    textbook: Mapping[str, float]
    exact: Mapping[str, float] = field(default_factory=dict)
    controls: Mapping[str, float]
    """And their expectations."""
    num_runs: int = 50


def one_server(load: float, sizes: Distribution | None, second_moment: float) -> Case:
    """Returns the case of one server with a size distribution of that second moment (textbook value)."""
    queue = Queue(server=ONE_SERVER, rate_per_s=load, sizes=sizes)
    wait_s, exact_s = mg1_wait_s(load, second_moment), mg1_wait_s(load, queue.second_moment)
    return Case(
        queue=queue,
        textbook={"sojourn": 1 + wait_s, "wait": wait_s, "busy share": load},
        exact={"sojourn": 1 + exact_s, "wait": exact_s},
        controls={"fast wait at 0": mg1_wait_s(load / SPEED, queue.second_moment) / SPEED},
    )


def many_servers(num_servers: int, load: float) -> Case:
    rate_per_s, wait_s = load * num_servers, mmk_wait_s(num_servers, load)
    exact_s = in_step_sojourn_s(
        rate_per_s, lambda n: min(n, num_servers), lambda n: 1 / OUTPUT_TOKENS, OUTPUT_TOKENS
    )
    queue = Queue(server=servers(num_servers), rate_per_s=rate_per_s)
    return Case(
        queue=queue,
        textbook={"sojourn": 1 + wait_s, "wait": wait_s, "busy share": load},
        exact={"sojourn": exact_s, "wait": exact_s - 1},
        controls=pooled(queue),
    )


def shared(load: float, sizes: Distribution | None = None) -> Case:
    """Returns the case of processor sharing, whose mean sojourn and slowdown are the same for all sizes.

    By the mean work present, that of Pollaczek and Khinchine: sizes of one length end earlier than in the
    textbook by the mean wait for the next iteration, half of one of load / (1 - load) sequences.
    """
    queue = Queue(server=SHARED, rate_per_s=load, sizes=sizes)
    sojourn_s = 1 / (1 - load)
    classes = ("slowdown of large",) if sizes else ("slowdown of small", "slowdown of large")
    if sizes is None:
        exact_s = in_step_sojourn_s(load, lambda n: n, lambda n: n / OUTPUT_TOKENS, OUTPUT_TOKENS)
    else:
        exact_s = sojourn_s - load / (1 - load) / OUTPUT_TOKENS / 2
    return Case(
        queue=queue,
        textbook={"sojourn": sojourn_s, "busy share": load, **dict.fromkeys(classes, sojourn_s)},
        exact={"sojourn": exact_s},
        controls=pooled(queue),
        num_runs=10 if sizes else 50,
    )


def helping(routing: Any, num_replicas: int, load: float, sojourn_s: float) -> Case:
    """Returns the case of replicas of which the less loaded one gets each request."""
    queue = Queue(
        server=ONE_SERVER, rate_per_s=load * num_replicas, routing=routing, num_replicas=num_replicas
    )
    return Case(
        queue=queue,
        textbook={"sojourn": sojourn_s, "busy share": load},
        exact={"sojourn": sojourn_s} if num_replicas == 2 else {},  # else of infinitely many
        controls=pooled(queue),
    )


def pooled(queue: Queue) -> dict[str, float]:
    return {"pooled wait": mg1_wait_s(queue.load, queue.second_moment) / queue.num_servers}


def apart(routing: Any, rate_per_s: float, sojourns_s: Sequence[Callable[[float], float]]) -> Case:
    """Returns the case of replicas that get requests regardless of their load.

    sojourns_s: the mean sojourn at each replica, as a function of the rate of all arrivals.
    """
    num_replicas = len(sojourns_s)
    known = {f"sojourn at {i}": sojourn_s(rate_per_s) for i, sojourn_s in enumerate(sojourns_s)}
    return Case(
        queue=Queue(server=ONE_SERVER, rate_per_s=rate_per_s, routing=routing, num_replicas=num_replicas),
        textbook={**known, "busy share": rate_per_s / num_replicas},
        exact=known,
        controls={
            f"fast wait at {i}": (sojourn_s(rate_per_s / SPEED) - 1) / SPEED
            for i, sojourn_s in enumerate(sojourns_s)
        },
    )


def share_of(share: float) -> Callable[[float], float]:
    """Returns the mean sojourn of M/M/1 with a share of the arrivals, as a function of their rate."""
    return lambda rate_per_s: 1 / (1 - share * rate_per_s)


def turns_of(*turns: int) -> Callable[[float], float]:
    return lambda rate_per_s: cyclic_sojourn_s(rate_per_s, turns)


CASES = {
    "M/M/1": lambda: one_server(0.5, None, 2.0),
    "M/D/1": lambda: one_server(0.5, Fixed(value=PROMPT_TOKENS), 1.0),
    "M/G/1 lognormal": lambda: one_server(0.5, Lognormal(mean=PROMPT_TOKENS, cv=0.7), 1.49),
    "M/M/2": lambda: many_servers(2, 0.6),
    "M/M/4": lambda: many_servers(4, 0.8),
    "M/M/1-PS": lambda: shared(0.6),
    "M/D/1-PS": lambda: shared(0.6, Fixed(value=OUTPUT_TOKENS)),
    "random": lambda: apart(Random(), 1.0, [share_of(0.5)] * 2),
    "unequal shares": lambda: apart(Shares(shares=(0.6, 0.4)), 1.0, [share_of(0.6), share_of(0.4)]),
    "round robin": lambda: apart(RoundRobin(), 1.8, [turns_of(1, 0, 0)] * 3),
    "weighted 2:1": lambda: apart(Weighted(weights=(2.0, 1.0)), 0.9, [turns_of(1, 1, 0), turns_of(0, 0, 1)]),
    "shorter of two": lambda: helping(LeastOutstanding(), 2, 0.7, shorter_of_two_sojourn_s(1.4)),
    "both of two": lambda: helping(PowerOfTwo(), 2, 0.7, shorter_of_two_sojourn_s(1.4)),
    "two of 200": lambda: helping(PowerOfTwo(), 200, 0.7, mean_field_sojourn_s(0.7, 2)),
}


@cache
def case_of(name: str) -> Case:
    return CASES[name]()


QUICK_CASES = ("M/M/1", "M/D/1", "both of two")
"""Cheap ones, in which a mistake in the clock, in the sizes or in the choice of a replica shows."""


def assert_agrees(case: Case, effort: Effort, num_runs: int, name: str = "") -> None:
    means = effort.means_of(case.queue, num_runs)
    controls = means[list(case.controls)] - pd.Series(case.controls)
    controls["excess size"] = means["excess size"]
    far = []
    for quantity, expected in case.textbook.items():
        value, half_width = regressed_mean(means[quantity], controls)
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


@pytest.mark.parametrize("name", QUICK_CASES)
def test_a_short_run_is_near_queueing_theory(name):
    assert_agrees(case_of(name), QUICK, QUICK_RUNS, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_99_percent_interval_lies_within_2_percent_of_theory(name):
    assert_agrees(case_of(name), FULL, case_of(name).num_runs, name)


@pytest.mark.parametrize(
    "routing", [Random(), RoundRobin(), LeastOutstanding()], ids=lambda r: type(r).__name__
)
def test_every_request_waits_as_long_as_lindley_says(routing):
    queue = Queue(server=ONE_SERVER, rate_per_s=2.4, routing=routing, num_replicas=3)
    requests, _ = simulate_queue(queue, 3000, seed=1)
    for _, rows in requests.groupby("replica"):
        assert len(rows) > 800
        np.testing.assert_allclose(rows.wait_s, lindley_wait_s(rows.arrival_s, rows.size_s), atol=1e-9)
        np.testing.assert_allclose(rows.sojourn_s, rows.wait_s + rows.size_s, atol=1e-9)


@pytest.mark.slow
def test_the_more_a_router_knows_the_shorter_the_sojourn():
    """Random, then in turns, then the shorter of two, then the shortest of all, on the same traffic."""
    routings = [Random(), RoundRobin(), PowerOfTwo(), LeastOutstanding()]
    sojourns_s = []
    for routing in routings:
        queue = Queue(server=ONE_SERVER, rate_per_s=8.0, routing=routing, num_replicas=10)
        sojourns_s.append([means_of_run(queue, 2000, 300, seed)["sojourn"] for seed in range(4)])
    for worse, better in pairwise(sojourns_s):
        assert compare_paired(better, worse).outcome("lower") is Outcome.BETTER


def test_whole_tokens_and_common_iterations_move_no_mean_by_half_a_percent():
    for case in map(case_of, CASES):
        for quantity, exact in case.exact.items():
            assert exact == pytest.approx(case.textbook[quantity], rel=0.005)
