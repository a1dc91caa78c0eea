r"""Sessions whose prompts share prefixes as a tree.

    system prompt 0 ---- session a: turn 0 ---- turn 1 ---- turn 2
                    \--- session b: turn 0 ---- turn 1

The turns come at times that do not depend on the engine, as in a recorded trace, so that all policies get the
same prompts at the same times, and a cache that knows the future can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from policies.core.request import Segment
from sim.workload.arrivals import ArrivalProcess, ClosedLoop
from sim.workload.base import Source
from sim.workload.chunks import TableSource
from sim.workload.distributions import (
    MAX_TOKENS,
    Distribution,
    FloatArray,
    IntArray,
    require_at_most,
    require_counts,
    require_not_negative,
    require_positive,
    stream,
    whole_numbers,
    zipf_draws,
)
from sim.workload.sessions import in_a_loop, require_number_in_a_loop

MAX_TURNS = 10_000
MAX_SYSTEM_PROMPTS = 1_000_000
MAX_SESSIONS = 10_000_000
"""Sessions of a run; each of their prompts takes some 100 bytes."""

Numbers = TypeVar("Numbers", FloatArray, IntArray)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixSessions:
    """Sessions that begin by `arrivals`; the traffic is what they send in duration_s.

    A session draws one of num_system_prompts system prompts, the k-th most popular with weight
    k^-system_prompt_skew. Its first prompt adds first_tokens to it, and each later prompt adds turn_tokens
    (the last output and the new message) to the one before, gap_s seconds later. Sessions also begin in the
    running_s seconds before the traffic, so that the mix of turns is the same from the start.

    In a closed loop each user has one session at a time, whose turns keep their gaps whatever the engine
    does. max_requests must then be set: it is the number of turns of all sessions, which begin in duration_s;
    running_s has no meaning.
    """

    arrivals: ArrivalProcess | ClosedLoop
    turns: Distribution
    first_tokens: Distribution
    turn_tokens: Distribution
    output_tokens: Distribution
    gap_s: Distribution
    system_prompt_tokens: Distribution
    duration_s: float
    num_system_prompts: int = 1
    system_prompt_skew: float = 1.0
    running_s: float = 3600.0
    max_requests: int | None = None
    patience_s: float | None = None

    def __post_init__(self) -> None:
        require_positive(self, "duration_s", "num_system_prompts", "max_requests", "patience_s")
        require_at_most(self, MAX_SYSTEM_PROMPTS, "num_system_prompts")
        require_not_negative(self, "running_s", "system_prompt_skew")
        require_counts(self, MAX_TURNS, "turns", "turns")
        names = ("first_tokens", "turn_tokens", "output_tokens", "system_prompt_tokens")
        require_counts(self, MAX_TOKENS, "tokens", *names)
        require_number_in_a_loop(self, "max_requests")
        if isinstance(self.arrivals, ClosedLoop):
            require_at_most(self, MAX_SESSIONS, "max_requests")

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the requests of the sessions in [0, duration_s), in order of time."""
        start_s = self._begins_s(seed)
        z_S = stream(seed, "sessions/turns").standard_normal(len(start_s))
        num_turns = whole_numbers(self.turns, z_S, MAX_TURNS)
        first_T = np.cumsum(num_turns) - num_turns  # row of each session's first turn
        session_T = np.repeat(np.arange(len(start_s)), num_turns)
        z_T3 = stream(seed, "sessions/said").standard_normal((len(session_T), 3))
        is_first = np.zeros(len(session_T), np.bool_)
        is_first[first_T] = True
        added_T: IntArray = np.where(
            is_first,
            whole_numbers(self.first_tokens, z_T3[:, 0]),
            whole_numbers(self.turn_tokens, z_T3[:, 0]),
        )
        wait_T = np.where(is_first, 0.0, self.gap_s.from_normal(z_T3[:, 1]))
        time_T = start_s[session_T] + _sums_within(wait_T, first_T, num_turns)
        system_tokens = whole_numbers(
            self.system_prompt_tokens, stream(seed, "system_prompts").standard_normal(self.num_system_prompts)
        )
        system_S = zipf_draws(
            stream(seed, "system_prompt_of"), self.num_system_prompts, self.system_prompt_skew, len(start_s)
        )
        prompt_T: IntArray = system_tokens[system_S][session_T] + _sums_within(added_T, first_T, num_turns)
        rows = np.arange(len(time_T))[: self.max_requests]  # of a closed loop: session after session
        if not isinstance(self.arrivals, ClosedLoop):
            inside = np.flatnonzero((time_T >= 0) & (time_T < self.duration_s))
            rows = inside[np.argsort(time_T[inside], kind="stable")][: self.max_requests]
        if not len(rows):
            raise ValueError(f"duration_s={self.duration_s}: must be longer; no request arrives in this time")
        output_T = whole_numbers(self.output_tokens, z_T3[:, 2])

        def segments(row: int, num_tokens: int) -> tuple[Segment, ...]:
            turn = int(rows[row])
            session = int(session_T[turn])
            system = int(system_S[session])
            pieces = [(system, int(system_tokens[system]))]
            turns = range(int(first_T[session]), turn + 1)
            pieces += [(self.num_system_prompts + t, int(added_T[t])) for t in turns]
            return cut_segments(pieces, num_tokens)

        sessions = TableSource.clipped(
            arrival_s=time_T[rows],
            prompt_tokens=prompt_T[rows],
            output_tokens=output_T[rows],
            max_model_len=max_model_len,
            segments=segments,
            patience_s=self.patience_s,
            session_ids=session_T[rows],
        )
        return in_a_loop(sessions, self.arrivals, seed=seed, duration_s=self.duration_s)

    def _begins_s(self, seed: int) -> FloatArray:
        """Returns when each session begins, in seconds after the begin of the traffic; 0 in a closed loop."""
        if isinstance(self.arrivals, ClosedLoop):
            assert self.max_requests is not None, "checked by require_number_in_a_loop"
            return np.zeros(self.max_requests)  # enough, as each has a turn
        span_s = self.running_s + self.duration_s
        start_s = self.arrivals.times_s(stream(seed, "sessions"), num_requests=None, duration_s=span_s)
        if len(start_s) > MAX_SESSIONS:
            raise ValueError(
                f"duration_s={self.duration_s}, running_s={self.running_s}: {len(start_s):,} sessions begin "
                f"in it; must be at most {MAX_SESSIONS:,}, as they are drawn at once; lower the rate or "
                "the times"
            )
        return start_s - self.running_s


def cut_segments(pieces: list[tuple[int, int]], num_tokens: int) -> tuple[Segment, ...]:
    """Returns the segments (content id, tokens) of the first num_tokens tokens."""
    kept, left = [], num_tokens
    for content_id, length in pieces:
        if left <= 0:
            break
        kept.append(Segment(content_id, min(length, left)))
        left -= length
    return tuple(kept)


def _sums_within(values_T: Numbers, first_T: IntArray, num_turns: IntArray) -> Numbers:
    """Sums the values of each session up to and including each turn."""
    total_T = np.cumsum(values_T)
    before_T = np.repeat(total_T[first_T] - values_T[first_T], num_turns)
    return total_T - before_T
