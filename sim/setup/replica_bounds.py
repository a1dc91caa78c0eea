"""What no engine can beat on given replicas: bounds that rule candidates out before they are simulated.

An idle replica is the best case of every request: its prompt alone in one iteration, then its answer decoded
alone. With t(n, c) the seconds of an iteration that decodes n sequences of c tokens of context together, and
p, a the tokens of a prompt and its answer:

    TTFT >= frontend + t(prompt p alone),  TPOT >= min over n of t(n, n (p + 1)),  E2E >= TTFT + (a - 1) TPOT

The share of the requests for which these keep within the SLO is the most that any number of replicas attains.

Work: of N requests, ceil(target N) must be good, so their work is done between the first arrival and the last
deadline, T seconds, by R replicas: R T >= work. Whoever is dropped, the work is at least the sum of that many
smallest:

    tokens   every token passes all matrices: (p + a - 1) x the least seconds a token of any iteration
    decode   an iteration that decodes n takes >= alpha + beta n (below all t(n, n)); good answers take at
             most L = the TPOT limit a token on average, so a token costs >= beta L / (L - alpha) seconds
    KV       p tokens of KV are held for the whole answer: p (a - 1) TPOT token-seconds of what memory holds
    slots    a slot is held for the whole answer: (a - 1) TPOT seconds of max_num_seqs

Prompts whose KV may be found in a cache count as one token. Iterations are assumed not to get shorter by
having more in them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations.iteration import IterationModel, IterationShape
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from sim.metrics.slo import Slo
from sim.setup.deployment import Deployment
from sim.workload.listed import ListedSource

Floats = NDArray[np.float64]

GRID: Floats = np.unique(np.geomspace(1, 32_768, 76).astype(np.int64)).astype(np.float64)
"""Numbers of tokens that iterations are priced for, 15 % apart: each costs milliseconds the first time.

What lies between two of them takes at least as long as the smaller one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Requests as far as bounds depend on them; arrays are [N], arrivals sorted."""

    arrival_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    reusable: bool
    """Whether a cache may find KV of prompts."""
    several: bool
    """Whether requests have several answers, which these bounds know nothing of."""

    @classmethod
    def of(cls, source: ListedSource) -> Demand:
        """Of an open loop."""
        requests = [arrival.request for arrival in source.listed]
        return cls(
            arrival_s=np.array([arrival.at_s for arrival in source.listed]),
            prompt_tokens=np.array([request.prompt.num_tokens for request in requests], np.float64),
            output_tokens=np.array([a.num_output_tokens for a in source.listed], np.float64),
            reusable=any(request.prompt.segments for request in requests),
            several=any(request.branching is not None for request in requests),
        )


class Idle(NamedTuple):
    """Latencies on an idle replica, which none gets below. Seconds, [N]."""

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats

    def shares(self, slo: Slo) -> dict[str, float]:
        """By term of the SLO: the largest share of the requests that keeps within it."""
        return {
            term: float((getattr(self, f"{term}_s") <= limit_s).mean())
            for term, limit_s in slo.limits_s.items()
        }

    def share(self, slo: Slo) -> float:
        """The same of all terms together."""
        held = [getattr(self, f"{term}_s") <= limit_s for term, limit_s in slo.limits_s.items()]
        return float(np.logical_and.reduce(held).mean())

    def limit_s(self, term: str, share: float) -> float:
        """Of a term: the smallest limit that so large a share keeps."""
        return least_limit(getattr(self, f"{term}_s"), share)


def least_limit(values: Floats, share: float) -> float:
    """The smallest limit that a share of the values keeps; NaN is beyond all limits. 0.9 of 10: the ninth."""
    ordered = np.sort(np.where(np.isnan(values), np.inf, values))
    return float(ordered[max(0, math.ceil(share * len(ordered) * (1 - 1e-12)) - 1)])


class Bounds(NamedTuple):
    """Of one replica's settings and a demand."""

    idle: Idle
    replicas: dict[str, int]
    """By resource: with fewer, not enough requests can be good."""


def bounds(deployment: Deployment, demand: Demand, slo: Slo, load: float = 1.0) -> Bounds:
    """load: arrivals come so many times as fast. Raises ValueError where the level cannot price it."""
    model = deployment.iteration_model()
    idle = idle_latencies(deployment, model, demand)
    return Bounds(idle, least_replicas(deployment, model, demand, slo, idle, load))


def idle_latencies(deployment: Deployment, model: IterationModel, demand: Demand) -> Idle:
    """Of every request."""
    prompts, answers = demand.prompt_tokens, demand.output_tokens
    if demand.several:
        nothing = np.zeros(len(prompts))
        return Idle(nothing, nothing, nothing)
    place = np.searchsorted(GRID, prompts, side="right") - 1
    lengths = GRID[: place.max() + 1]
    ttft_s = deployment.engine.frontend_s + _prompt_seconds(model, lengths, demand.reusable)[place]
    step_s = _step_seconds(model, lengths + 1, deployment.engine.max_num_seqs)[place]
    tpot_s = np.where(answers > 1, step_s, 0.0)
    return Idle(ttft_s, tpot_s, ttft_s + (answers - 1) * tpot_s)


def least_replicas(
    deployment: Deployment,
    model: IterationModel,
    demand: Demand,
    slo: Slo,
    idle: Idle,
    load: float = 1.0,
) -> dict[str, int]:
    """By resource: fewer replicas cannot have enough good requests."""
    deadline_s = _deadlines(demand, slo)
    if demand.several or not np.isfinite(deadline_s).all():
        return {"tokens": 1}
    num_good = math.ceil(slo.attainment_target * len(demand.arrival_s) * (1 - 1e-12))
    arrival_s = demand.arrival_s / load
    time_s = float(arrival_s[-1] - arrival_s[0] + deadline_s.max())
    engine = deployment.engine
    prompts, answers = demand.prompt_tokens, demand.output_tokens
    computed = np.ones_like(prompts) if demand.reusable else prompts
    held_s = (answers - 1) * idle.tpot_s
    decoded_s = (answers - 1) * decode_token_seconds(model, engine.max_num_seqs, slo)
    needed_s = {
        "tokens": _sum_of_least((computed + answers - 1) * token_seconds(model), num_good),
        "decode": _sum_of_least(decoded_s, num_good),
        "slots": _sum_of_least(held_s, num_good) / engine.max_num_seqs,
    }
    if isinstance(deployment.caching, Paged | PrefixCaching | Radix) and not demand.reusable:
        plan = deployment.plan_memory()
        needed_s["KV"] = _sum_of_least(prompts * held_s, num_good) / (plan.num_blocks * plan.block_size)
    return {name: max(1, math.ceil(seconds / time_s - 1e-9)) for name, seconds in needed_s.items()}


def token_seconds(model: IterationModel) -> float:
    """The least that a token adds to any iteration, attention left out."""
    counts = GRID[GRID <= MOST_TOKENS]
    zeros = np.zeros_like(counts)
    seconds = _known(model.seconds(IterationShape(zeros, zeros, zeros + 1, counts, counts, counts, zeros)))
    return float((seconds[:-1] / counts[1:]).min())


MOST_TOKENS = 20_000
"""Of an iteration, beyond every engine's budget that we know; more take no less time a token."""


def decode_token_seconds(model: IterationModel, max_num_seqs: int, slo: Slo) -> float:
    """The least that a decoded token costs where answers keep the TPOT limit on average."""
    counts = np.arange(1, max_num_seqs + 1, dtype=np.float64)
    seconds = _decode_seconds(model, counts, counts)
    alpha, beta = _line_below(counts, seconds)
    limit_s = slo.limits_s.get("tpot", math.inf)
    most = (limit_s - alpha) / beta if beta > 0 else math.inf
    at_once = max(1.0, min(most, float(max_num_seqs)))
    return alpha / at_once + beta


def _line_below(counts: Floats, seconds: Floats) -> tuple[float, float]:
    """alpha, beta >= 0 of a line below all seconds, through the smallest as far as that goes."""
    if len(counts) == 1:
        return float(seconds[0]), 0.0
    start_s = float(seconds.min())
    beta = max(0.0, float(((seconds[1:] - start_s) / (counts[1:] - counts[0])).min()))
    return max(0.0, start_s - beta * float(counts[0])), beta


def _prompt_seconds(model: IterationModel, lengths: Floats, reusable: bool) -> Floats:
    """Of a prompt alone; the last token of it where a cache may find the others."""
    ones, zeros = np.ones_like(lengths), np.zeros_like(lengths)
    if reusable:
        return _known(model.seconds(IterationShape(zeros, zeros, ones, ones, lengths, lengths, ones)))
    pairs = lengths * (lengths + 1) / 2
    return _known(model.seconds(IterationShape(zeros, zeros, ones, lengths, pairs, lengths, ones)))


def _step_seconds(model: IterationModel, contexts: Floats, max_num_seqs: int) -> Floats:
    """The shortest iteration that decodes a sequence of so much context, alone or among its like."""
    counts = [2**k for k in range(max_num_seqs.bit_length()) if 2**k <= min(max_num_seqs, 64)]
    least: Floats = np.min([_decode_seconds(model, n + 0 * contexts, n * contexts) for n in counts], axis=0)
    return least


def _decode_seconds(model: IterationModel, seqs: Floats, contexts: Floats) -> Floats:
    zeros = np.zeros_like(seqs)
    return _known(model.seconds(IterationShape(seqs, contexts, zeros, zeros, zeros, zeros, seqs)))


def _known(seconds: object) -> Floats:
    """What a level that only replays has not seen takes no time."""
    return np.nan_to_num(np.asarray(seconds, np.float64), nan=0.0)


def _deadlines(demand: Demand, slo: Slo) -> Floats:
    """Seconds after its arrival by which a good answer has ended."""
    limits: Mapping[str, float] = slo.limits_s
    gaps = demand.output_tokens - 1
    decoded_s = np.where(gaps > 0, gaps * limits["tpot"] if "tpot" in limits else math.inf, 0.0)
    return np.minimum(limits.get("ttft", math.inf) + decoded_s, limits.get("e2e", math.inf))


def _sum_of_least(work: Floats, count: int) -> float:
    return float(np.sort(work)[:count].sum())
