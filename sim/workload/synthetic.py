"""Generated traffic: an arrival process, or a population of waiting users, with a distribution of lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.workload.arrivals import ArrivalProcess, ClosedLoop
from sim.workload.base import Source, WorkloadNotes
from sim.workload.checks import require_positive
from sim.workload.closed_loop import ClosedLoopSource
from sim.workload.distributions import FloatArray, IntArray
from sim.workload.lengths import BoolArray, Lengths, clip_to_context
from sim.workload.streams import stream
from sim.workload.table import TableSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Synthetic:
    """Independent requests.

    num_requests and duration_s both limit the traffic; at least one is set. max_tokens is the limit that
    every client sets on its output (answers end there), patience_s the time after which a client gives up.
    priority_shares[p] is the share of requests, or of users in a closed loop, with priority p; empty: all 0.
    """

    arrivals: ArrivalProcess | ClosedLoop
    lengths: Lengths
    num_requests: int | None = None
    duration_s: float | None = None
    max_tokens: int | None = None
    patience_s: float | None = None
    priority_shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "priority_shares", tuple(float(share) for share in self.priority_shares))
        require_positive(self, "num_requests", "duration_s", "max_tokens", "patience_s")
        if self.num_requests is None and self.duration_s is None:
            raise ValueError("num_requests=null, duration_s=null: at least one must be set")
        if self.num_requests is None and _never_pauses(self.arrivals):
            raise ValueError("num_requests=null: must be set for users that do not think between requests")
        shares = self.priority_shares
        if shares and not (min(shares) >= 0 and abs(sum(shares) - 1) < 1e-6):
            raise ValueError(f"priority_shares={list(shares)}: must be >= 0 and sum to 1")

    def source(self, *, seed: int, max_model_len: int) -> Source:
        def tokens_of(z_N2: FloatArray) -> tuple[IntArray, IntArray, BoolArray]:
            prompts, outputs = self.lengths.from_normal(z_N2)
            if self.max_tokens is not None:
                outputs = np.minimum(outputs, self.max_tokens)
            return clip_to_context(prompts, outputs, max_model_len)

        if isinstance(self.arrivals, ClosedLoop):
            return ClosedLoopSource(
                loop=self.arrivals,
                tokens_of=tokens_of,
                seed=seed,
                num_requests=self.num_requests,
                duration_s=self.duration_s,
                priorities=self._priorities(seed, self.arrivals.num_users),
                max_tokens=self.max_tokens,
                patience_s=self.patience_s,
            )
        arrival_s = self.arrivals.times_s(
            stream(seed, "arrivals"), num_requests=self.num_requests, duration_s=self.duration_s
        )
        if not len(arrival_s):
            raise ValueError(f"duration_s={self.duration_s}: no request arrives in this time; make it longer")
        prompts, outputs, clipped = tokens_of(stream(seed, "lengths").standard_normal((len(arrival_s), 2)))
        return TableSource(
            arrival_s=arrival_s,
            prompt_tokens=prompts,
            output_tokens=outputs,
            notes=WorkloadNotes(num_clipped=int(np.count_nonzero(clipped))),
            priorities=self._priorities(seed, len(arrival_s)),
            max_tokens=self.max_tokens,
            patience_s=self.patience_s,
        )

    def _priorities(self, seed: int, count: int) -> IntArray:
        if not self.priority_shares:
            return np.zeros(count, np.int64)
        upper = np.cumsum(self.priority_shares)[:-1]
        drawn = stream(seed, "priorities").random(count)
        return np.searchsorted(upper, drawn, side="right").astype(np.int64)


def _never_pauses(arrivals: ArrivalProcess | ClosedLoop) -> bool:
    """Whether requests that are refused at once could follow each other without time passing."""
    return isinstance(arrivals, ClosedLoop) and not arrivals.think_time_s.from_normal(np.array([8.0])).any()
