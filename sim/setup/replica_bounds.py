"""Analytic bounds that no engine can beat on given replicas; they exclude candidates without simulating them.

An idle replica is the best case of every request: its prompt alone in one iteration, then its output decoded
alone. Let t(n, c) be the seconds of an iteration that decodes n sequences with c tokens of context in total,
and p, a the numbers of prompt tokens and output tokens of a request:

    TTFT >= frontend + t(prompt p alone),  TPOT >= min over n of t(n, n (p + 1)),  E2E >= TTFT + (a - 1) TPOT

The share of requests whose bounds meet the SLO is an upper bound of the attainment for any number of
replicas.

Work: of N requests, ceil(target N) must meet the SLO, so R replicas must do their work between the first
arrival and the last deadline, within T seconds: R T >= work. For any choice of requests that miss the SLO,
the work is at least the sum over the ceil(target N) requests with the least work:

    tokens   every token passes all matrices: (p + a - 1) x the minimum seconds per token of any iteration
    decode   an iteration that decodes n takes >= alpha + beta n (below all t(n, n)); requests that meet the
             SLO take at most L, the TPOT limit, per token, so a token takes >= beta L / (L - alpha) seconds
    KV       p tokens of KV are held while decoding: p (a - 1) TPOT token-seconds of the KV capacity
    slots    a slot is held while decoding: (a - 1) TPOT seconds of max_num_seqs

With speculation a pass yields at most m tokens per sequence, so TPOT and the seconds per decoded token are at
least 1/m of these. Prompts with KV that may be in a cache count as one token. It is assumed that an iteration
with more tokens or sequences is not shorter. With jitter any iteration may be short, so the bounds are
trivial.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations import IterationModel, IterationShape
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from sim.engine.frontend import Frontend
from sim.metrics.slo import Slo
from sim.setup.deployment import Deployment, max_tokens_per_pass
from sim.workload.listed import ListedSource

Floats = NDArray[np.float64]

GRID: Floats = np.unique(np.geomspace(1, 32_768, 76).astype(np.int64)).astype(np.float64)
"""Numbers of tokens for which iterations are priced, 15 % apart because pricing takes milliseconds.

A number between two of them takes at least as long as the smaller one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The properties of requests on which the bounds depend; arrays are [N], arrivals sorted."""

    arrival_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    reusable: bool
    """Whether KV of prompts may be found in a cache."""
    has_branches: bool
    """Whether requests have several branches, for which these bounds are trivial."""

    @classmethod
    def of(cls, source: ListedSource) -> Demand:
        """Returns the demand of open-loop traffic."""
        requests = [arrival.request for arrival in source.listed]
        return cls(
            arrival_s=np.array([arrival.at_s for arrival in source.listed]),
            prompt_tokens=np.array([request.prompt.num_tokens for request in requests], np.float64),
            output_tokens=np.array([a.num_output_tokens for a in source.listed], np.float64),
            reusable=any(request.prompt.segments for request in requests),
            has_branches=any(request.branching is not None for request in requests),
        )


class Idle(NamedTuple):
    """Latencies on an idle replica, which are lower bounds. Seconds, [N]."""

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats

    def shares(self, slo: Slo) -> dict[str, float]:
        """Returns the largest possible share of requests within the limit, by term of the SLO."""
        return {
            term: float((getattr(self, f"{term}_s") <= limit_s).mean())
            for term, limit_s in slo.request_limits_s.items()
        }

    def share(self, slo: Slo) -> float:
        """Returns the largest possible share of requests within all limits of the SLO."""
        held = [getattr(self, f"{term}_s") <= limit_s for term, limit_s in slo.request_limits_s.items()]
        return float(np.logical_and.reduce(held).mean())

    def limit_s(self, term: str, share: float) -> float:
        """Returns the smallest limit of a term, in seconds, that a share of the requests can meet."""
        return least_limit(getattr(self, f"{term}_s"), share)


def least_limit(values: Floats, share: float) -> float:
    """Returns the smallest limit that a share of the values meets; 0.9 of 10: the ninth.

    NaN never meets it.
    """
    ordered = np.sort(np.where(np.isnan(values), np.inf, values))
    return float(ordered[max(0, math.ceil(share * len(ordered) * (1 - 1e-12)) - 1)])


class Bounds(NamedTuple):
    """Bounds for a deployment and a demand."""

    idle: Idle
    replicas: dict[str, int]
    """Minimum number of replicas with which enough requests can meet the SLO, by resource."""


def bounds(deployment: Deployment, demand: Demand, slo: Slo, load: float = 1.0) -> Bounds:
    """Returns the bounds for a deployment and a demand.

    load: factor on the arrival rate. Raises ValueError if the latency model cannot price the deployment.
    """
    model = deployment.iteration_model()
    idle = idle_latencies(deployment, model, demand)
    return Bounds(idle, least_replicas(deployment, model, demand, slo, idle, load))


def idle_latencies(deployment: Deployment, model: IterationModel, demand: Demand) -> Idle:
    """Returns the latencies of every request on an idle replica."""
    prompts, outputs = demand.prompt_tokens, demand.output_tokens
    if demand.has_branches or deployment.jitter is not None:
        zeros = np.zeros(len(prompts))
        return Idle(zeros, zeros, zeros)
    index = np.searchsorted(GRID, prompts, side="right") - 1
    lengths = GRID[: index.max() + 1]
    engine, frontend = deployment.engine, deployment.engine.frontend or Frontend()
    work_s = frontend.request_s + frontend.prompt_token_s * prompts
    # Chunks of a prompt overlap in the stages of a pipeline, in the best case all of them.
    stages = deployment.layout.pipeline_parallel_size
    ttft_s = engine.frontend_s + work_s + _prompt_seconds(model, lengths, demand.reusable)[index] / stages
    step_s = _step_seconds(model, lengths + 1, deployment.max_num_seqs)[index]
    tpot_s = np.where(outputs > 1, step_s / max_tokens_per_pass(deployment.speculation), 0.0)
    return Idle(ttft_s, tpot_s, ttft_s + (outputs - 1) * tpot_s)


def least_replicas(
    deployment: Deployment,
    model: IterationModel,
    demand: Demand,
    slo: Slo,
    idle: Idle,
    load: float = 1.0,
) -> dict[str, int]:
    """Returns the minimum number of replicas with which enough requests can meet the SLO, by resource."""
    deadline_s = _deadlines(demand, slo)
    if demand.has_branches or deployment.jitter is not None or not np.isfinite(deadline_s).all():
        return {"tokens": 1}
    num_good = math.ceil(slo.attainment_target * len(demand.arrival_s) * (1 - 1e-12))
    arrival_s = demand.arrival_s / load
    time_s = float(arrival_s[-1] - arrival_s[0] + deadline_s.max())
    max_num_seqs = deployment.max_num_seqs
    prompts, outputs = demand.prompt_tokens, demand.output_tokens
    computed = np.ones_like(prompts) if demand.reusable else prompts
    held_s = (outputs - 1) * idle.tpot_s
    at_once = max_tokens_per_pass(deployment.speculation)
    decoded_s = (outputs - 1) * decode_token_seconds(model, max_num_seqs, slo, at_once)
    needed_s = {
        "tokens": _sum_of_least((computed + outputs - 1) * token_seconds(model), num_good),
        "decode": _sum_of_least(decoded_s, num_good),
        "slots": _sum_of_least(held_s, num_good) / max_num_seqs,
    }
    if isinstance(deployment.caching, Paged | PrefixCaching | Radix) and not demand.reusable:
        plan = deployment.plan_memory()
        tokens = prompts + plan.state_blocks * plan.block_size
        needed_s["KV"] = _sum_of_least(tokens * held_s, num_good) / (plan.num_blocks * plan.block_size)
    return {name: max(1, math.ceil(seconds / time_s - 1e-9)) for name, seconds in needed_s.items()}


def token_seconds(model: IterationModel) -> float:
    """Returns the minimum seconds per token of any iteration, without attention."""
    counts = GRID[GRID <= MOST_TOKENS]
    zeros = np.zeros_like(counts)
    seconds = _known(model.seconds(IterationShape(zeros, zeros, zeros + 1, counts, counts, counts, zeros)))
    return float((seconds[:-1] / counts[1:]).min())


MOST_TOKENS = 20_000
"""More tokens than any known engine computes in an iteration; beyond it, the time per token is constant."""


def decode_token_seconds(
    model: IterationModel, max_num_seqs: int, slo: Slo, tokens_per_pass: int = 1
) -> float:
    """Returns the minimum seconds per decoded token of requests that meet the TPOT limit."""
    counts = np.arange(1, max_num_seqs + 1, dtype=np.float64)
    seconds = _decode_seconds(model, counts, counts)
    alpha, beta = _line_below(counts, seconds)
    limit_s = slo.limits_s.get("tpot", math.inf) * tokens_per_pass
    most = (limit_s - alpha) / beta if beta > 0 else math.inf
    at_once = max(1.0, min(most, float(max_num_seqs)))
    return (alpha / at_once + beta) / tokens_per_pass


def _line_below(counts: Floats, seconds: Floats) -> tuple[float, float]:
    """Returns alpha and beta >= 0 of a line alpha + beta n that never exceeds the seconds."""
    if len(counts) == 1:
        return float(seconds[0]), 0.0
    start_s = float(seconds.min())
    beta = max(0.0, float(((seconds[1:] - start_s) / (counts[1:] - counts[0])).min()))
    return max(0.0, start_s - beta * float(counts[0])), beta


def _prompt_seconds(model: IterationModel, lengths: Floats, reusable: bool) -> Floats:
    """Returns the prefill seconds of a prompt alone, or of only its last token if the rest may be cached."""
    ones, zeros = np.ones_like(lengths), np.zeros_like(lengths)
    if reusable:
        return _known(model.seconds(IterationShape(zeros, zeros, ones, ones, lengths, lengths, ones)))
    pairs = lengths * (lengths + 1) / 2
    return _known(model.seconds(IterationShape(zeros, zeros, ones, lengths, pairs, lengths, ones)))


def _step_seconds(model: IterationModel, contexts: Floats, max_num_seqs: int) -> Floats:
    """Returns the shortest iteration that decodes a sequence of a context, alone or with equal sequences."""
    counts = [2**k for k in range(max_num_seqs.bit_length()) if 2**k <= min(max_num_seqs, 64)]
    least: Floats = np.min([_decode_seconds(model, n + 0 * contexts, n * contexts) for n in counts], axis=0)
    return least


def _decode_seconds(model: IterationModel, seqs: Floats, contexts: Floats) -> Floats:
    zeros = np.zeros_like(seqs)
    return _known(model.seconds(IterationShape(seqs, contexts, zeros, zeros, zeros, zeros, seqs)))


def _known(seconds: object) -> Floats:
    """Replaces NaN, for iterations unknown to a recorded model, by 0 seconds."""
    return np.nan_to_num(np.asarray(seconds, np.float64), nan=0.0)


def _deadlines(demand: Demand, slo: Slo) -> Floats:
    """Returns the seconds after arrival within which a request that meets the SLO ends."""
    limits: Mapping[str, float] = slo.limits_s
    gaps = demand.output_tokens - 1
    decoded_s = np.where(gaps > 0, gaps * limits["tpot"] if "tpot" in limits else math.inf, 0.0)
    return np.minimum(limits.get("ttft", math.inf) + decoded_s, limits.get("e2e", math.inf))


def _sum_of_least(work: Floats, count: int) -> float:
    return float(np.sort(work)[:count].sum())
