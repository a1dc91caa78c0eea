"""Generated traffic: independent requests by an arrival process, or by the users of a closed loop."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from sim.workload.answers import ONE_ANSWER, Answers
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
    """Settings of independent requests.

    num_requests and duration_s both limit the traffic; at least one must be set. max_tokens is the limit that
    every client sets on its output, where outputs end; exact: the limit is the output length of the request,
    as in benchmarks that ignore the end-of-sequence token. patience_s: a client aborts its request this long
    after its arrival. priority_shares[p] is the share of requests, or of users in a closed loop, with
    priority p; empty: all have priority 0. branching: several samples per prompt; open loop only.
    deadlines_s[p]: deadline of requests of priority p in seconds after their arrival; null: none; empty: none
    for all.
    """

    arrivals: ArrivalProcess | ClosedLoop
    lengths: Lengths
    num_requests: int | None = None
    duration_s: float | None = None
    max_tokens: int | Literal["exact"] | None = None
    patience_s: float | None = None
    priority_shares: tuple[float, ...] = ()
    deadlines_s: tuple[float | None, ...] = ()
    branching: Answers = ONE_ANSWER

    def __post_init__(self) -> None:
        object.__setattr__(self, "priority_shares", tuple(float(share) for share in self.priority_shares))
        object.__setattr__(self, "deadlines_s", tuple(self.deadlines_s))
        require_positive(self, "num_requests", "duration_s", "patience_s")
        if isinstance(self.max_tokens, str):
            if self.max_tokens != "exact":
                raise ValueError(f"max_tokens={self.max_tokens}: must be a number of tokens, exact, or null")
        else:
            require_positive(self, "max_tokens")
        if self.num_requests is None and self.duration_s is None:
            raise ValueError("num_requests=null, duration_s=null: at least one must be set")
        if self.num_requests is None and _never_pauses(self.arrivals):
            raise ValueError("num_requests=null: must be set if the think time of users is 0 s")
        shares = self.priority_shares
        if shares and not (min(shares) >= 0 and abs(sum(shares) - 1) < 1e-6):
            raise ValueError(f"priority_shares={list(shares)}: must be >= 0 and sum to 1")
        if self.branching.width > 1 and isinstance(self.arrivals, ClosedLoop):
            raise ValueError(
                f"branching.width={self.branching.width}: must be 1 in a closed loop; several samples need "
                "open-loop arrivals such as workload/arrivals=poisson"
            )
        due = self.deadlines_s
        if not all(deadline_s is None or 0 < deadline_s < inf for deadline_s in due):
            raise ValueError(f"deadlines_s={list(due)}: must be finite and > 0 s, or null for no deadline")
        if due and len(due) != max(1, len(shares)):
            raise ValueError(
                f"deadlines_s={list(due)}: must have one value for each of priority_shares={list(shares)}"
            )

    def source(self, *, seed: int, max_model_len: int) -> Source:
        def tokens_of(z_N2: FloatArray) -> tuple[IntArray, IntArray, BoolArray]:
            prompts, outputs = self.lengths.from_normal(z_N2)
            if isinstance(self.max_tokens, int):
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
                deadlines_s=self.deadlines_s,
                patience_s=self.patience_s,
            )
        arrival_s = self.arrivals.times_s(
            stream(seed, "arrivals"), num_requests=self.num_requests, duration_s=self.duration_s
        )
        if not len(arrival_s):
            raise ValueError(f"duration_s={self.duration_s}: must be longer; no request arrives in this time")
        z_N2 = stream(seed, "lengths").standard_normal((len(arrival_s), 2))
        prompts, outputs, clipped = tokens_of(z_N2)
        samples_NW = self._samples(seed, z_N2, max_model_len)
        if samples_NW is not None:
            prompts, outputs, clipped = clip_to_context(prompts, samples_NW.max(axis=1), max_model_len)
        return TableSource(
            arrival_s=arrival_s,
            prompt_tokens=prompts,
            output_tokens=outputs,
            notes=WorkloadNotes(num_clipped=int(np.count_nonzero(clipped))),
            priorities=self._priorities(seed, len(arrival_s)),
            max_tokens=self.max_tokens,
            deadlines_s=self.deadlines_s,
            patience_s=self.patience_s,
            branching=self.branching.branching,
            samples_NW=samples_NW,
        )

    def _samples(self, seed: int, z_N2: FloatArray, max_model_len: int) -> IntArray | None:
        """Draws the output tokens [N, width] of independent samples; None if requests have one sample.

        The first sample has the same length as without the others.
        """
        width = self.branching.width
        if width == 1 or self.branching.every is not None:
            return None
        z_NW = stream(seed, "samples").standard_normal((len(z_N2), width))
        z_NW[:, 0] = z_N2[:, 1]
        columns = [self.lengths.from_normal(np.stack([z_N2[:, 0], z_N], axis=1))[1] for z_N in z_NW.T]
        limit = max_model_len - 1
        if isinstance(self.max_tokens, int):
            limit = min(limit, self.max_tokens)
        return np.minimum(np.stack(columns, axis=1), limit)

    def _priorities(self, seed: int, count: int) -> IntArray:
        if not self.priority_shares:
            return np.zeros(count, np.int64)
        upper = np.cumsum(self.priority_shares)[:-1]
        drawn = stream(seed, "priorities").random(count)
        return np.searchsorted(upper, drawn, side="right").astype(np.int64)


def _never_pauses(arrivals: ArrivalProcess | ClosedLoop) -> bool:
    """Returns whether a rejected request could be followed by the next at the same time, without end."""
    return isinstance(arrivals, ClosedLoop) and not arrivals.think_time_s.from_normal(np.array([8.0])).any()
