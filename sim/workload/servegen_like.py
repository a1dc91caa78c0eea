"""Traffic of many clients of different size, burstiness and lengths, as in ServeGen's description.

Xiang et al., "ServeGen", NSDI 2026, published of the traffic of a model service (M-small) that 29 of its
2,412 clients send 90 % of the requests; that gaps are burstier than Poisson's (a coefficient of variation
above 1) and are fitted by Gamma or Weibull distributions; that prompts follow a lognormal body with a Pareto
tail and outputs an exponential distribution; and that a client's lengths differ from those of the others.
Here the k-th largest client sends a share of the requests proportional to k^-client_skew: with 2,412 clients,
a skew of 1.57 gives 29 of them 90 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.workload.base import Source, WorkloadNotes
from sim.workload.checks import MAX_CV, MAX_TOKENS, require_counts, require_not_negative, require_positive
from sim.workload.chunks import objects
from sim.workload.distributions import Distribution, FloatArray, IntArray
from sim.workload.lengths import clip_to_context
from sim.workload.renewal import Gaps, renewal_times_s
from sim.workload.streams import stream
from sim.workload.table import TableSource

MAX_CLIENTS = 100_000
MIN_CV = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeGenLike:
    """Clients of a service, which are the tenants client-0 (the largest), client-1, ...

    Each client draws the cv of its gaps, its mean prompt and its mean output once; its requests have Gamma
    gaps, lognormal prompts (cv prompt_cv) of which a share is stretched by a Pareto tail, and exponential
    outputs, with these means.
    """

    rate_per_s: float
    """Requests/s of all clients together."""
    duration_s: float
    num_clients: int = 2412
    client_skew: float = 1.57
    """Exponent of the clients' shares of the requests; 0: equal."""
    gap_cv: Distribution
    """Coefficient of variation of a client's gaps."""
    prompt_tokens: Distribution
    """Mean prompt of a client."""
    output_tokens: Distribution
    """Mean output of a client."""
    prompt_cv: float = 1.0
    tail_share: float = 0.02
    """Share of the prompts in the Pareto tail."""
    tail_exponent: float = 2.5
    """Exponent of the tail: P(X > x) falls as x^-tail_exponent; > 1, so that the mean exists."""
    tail_from: float = 4.0
    """Beginning of the tail, in means of the body."""
    max_requests: int | None = None
    patience_s: float | None = None

    def __post_init__(self) -> None:
        require_positive(
            self, "rate_per_s", "duration_s", "prompt_cv", "tail_from", "max_requests", "patience_s"
        )
        require_not_negative(self, "client_skew")
        require_counts(self, MAX_TOKENS, "tokens", "prompt_tokens", "output_tokens")
        if not 1 <= self.num_clients <= MAX_CLIENTS:
            raise ValueError(f"num_clients={self.num_clients}: must be >= 1 and <= {MAX_CLIENTS:,}")
        if not self.prompt_cv <= MAX_CV:
            raise ValueError(f"prompt_cv={self.prompt_cv}: must be <= {MAX_CV:g}")
        if not 0 <= self.tail_share < 1:
            raise ValueError(f"tail_share={self.tail_share}: must be >= 0 and < 1")
        if not 1 < self.tail_exponent < 1e3:
            raise ValueError(
                f"tail_exponent={self.tail_exponent}: must be > 1, for a finite mean, and < 1000"
            )

    @property
    def shares(self) -> FloatArray:
        """Share of the requests of each client, the largest first; they sum to 1."""
        weights = np.arange(1.0, self.num_clients + 1) ** -self.client_skew
        shares: FloatArray = weights / weights.sum()
        return shares

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic of all clients, in order of time."""
        z_N3 = stream(seed, "clients").standard_normal((self.num_clients, 3))
        cv_N = np.clip(self.gap_cv.from_normal(z_N3[:, 0]), MIN_CV, MAX_CV)
        times_s = [
            renewal_times_s(Gaps.of_gamma(rate, cv), stream(seed, "clients/gaps", client), self.duration_s)
            for client, (rate, cv) in enumerate(
                zip((self.rate_per_s * self.shares).tolist(), cv_N.tolist(), strict=True)
            )
        ]
        client_R = np.repeat(np.arange(self.num_clients), [len(times) for times in times_s])
        arrival_s = np.concatenate(times_s)
        if not len(arrival_s):
            raise ValueError(f"duration_s={self.duration_s}: must be longer; no request arrives in this time")
        order = np.argsort(arrival_s, kind="stable")[: self.max_requests]
        arrival_s, client_R = arrival_s[order], client_R[order]
        means_N2 = np.stack(
            [self.prompt_tokens.from_normal(z_N3[:, 1]), self.output_tokens.from_normal(z_N3[:, 2])], axis=1
        )
        prompts, outputs, clipped = clip_to_context(*self._lengths(seed, means_N2[client_R]), max_model_len)
        names = objects([f"client-{client}" for client in range(self.num_clients)])
        return TableSource(
            arrival_s=arrival_s,
            prompt_tokens=prompts,
            output_tokens=outputs,
            notes=WorkloadNotes(num_clipped=int(np.count_nonzero(clipped))),
            patience_s=self.patience_s,
            tenants=names[client_R],
        )

    def _lengths(self, seed: int, means_R2: FloatArray) -> tuple[IntArray, IntArray]:
        """Draws prompts and outputs whose means are those of each request's client."""
        rng = stream(seed, "clients/lengths")
        count = len(means_R2)
        variance = np.log1p(self.prompt_cv**2)
        body = np.exp(np.sqrt(variance) * rng.standard_normal(count) - variance / 2)
        tail = self.tail_from * (1 + rng.pareto(self.tail_exponent, count))
        in_tail = rng.random(count) < self.tail_share
        tail_mean = self.tail_from * self.tail_exponent / (self.tail_exponent - 1)
        mean = 1 + self.tail_share * (tail_mean - 1)
        prompts = means_R2[:, 0] * np.where(in_tail, tail, body) / mean
        outputs = means_R2[:, 1] * rng.exponential(1.0, count)
        return _whole(prompts), _whole(outputs)


def _whole(tokens: FloatArray) -> IntArray:
    return np.clip(np.rint(tokens), 1, MAX_TOKENS).astype(np.int64)
