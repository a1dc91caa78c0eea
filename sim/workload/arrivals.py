"""Arrival times of requests: open-loop arrival processes, and the users of a closed loop.

Times start at 0 s. The first n times of a random stream do not depend on how many are drawn.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sim.workload.distributions import (
    MAX_CV,
    Distribution,
    FloatArray,
    require_at_most,
    require_not_negative,
    require_positive,
)

Draw = Callable[[], FloatArray]
CHUNK = 4096  # times drawn at once; a change of this number changes every generated workload


class ArrivalProcess(Protocol):
    """Settings of an arrival process.

    A process can also have a method `chunks_s` with the same arguments, which yields the same times array by
    array, so that any number of requests takes the same memory.
    """

    def times_s(
        self, rng: np.random.Generator, *, num_requests: int | None, duration_s: float | None
    ) -> FloatArray:
        """Draws sorted arrival times in [0, duration_s), at most num_requests. At least one limit is set."""
        ...


def arrival_chunks_s(
    arrivals: ArrivalProcess,
    rng: np.random.Generator,
    *,
    num_requests: int | None,
    duration_s: float | None,
) -> Iterator[FloatArray]:
    """Draws arrival times array by array; a process without `chunks_s` draws all of them first."""
    chunks_s = getattr(arrivals, "chunks_s", None)
    if chunks_s is not None:
        yield from chunks_s(rng, num_requests=num_requests, duration_s=duration_s)
        return
    times_s = arrivals.times_s(rng, num_requests=num_requests, duration_s=duration_s)
    for start in range(0, len(times_s), CHUNK):
        yield times_s[start : start + CHUNK]


class _InChunks(ABC):
    """An arrival process whose times are drawn array by array."""

    __slots__ = ()

    @abstractmethod
    def chunks_s(
        self, rng: np.random.Generator, *, num_requests: int | None, duration_s: float | None
    ) -> Iterator[FloatArray]:
        """Draws arrival times up to the limits; see `ArrivalProcess`."""

    def times_s(
        self, rng: np.random.Generator, *, num_requests: int | None, duration_s: float | None
    ) -> FloatArray:
        """Draws all arrival times; see `ArrivalProcess`."""
        chunks = self.chunks_s(rng, num_requests=num_requests, duration_s=duration_s)
        return np.concatenate([np.empty(0), *chunks])


class _Drawn(_InChunks):
    """An arrival process that is drawn in chunks."""

    __slots__ = ()

    @abstractmethod
    def _chunks(self, rng: np.random.Generator) -> Draw:
        """Returns a function that draws the next chunk of increasing times."""

    def chunks_s(
        self, rng: np.random.Generator, *, num_requests: int | None, duration_s: float | None
    ) -> Iterator[FloatArray]:
        """Draws arrival times up to the limits; see `ArrivalProcess`."""
        max_count = math.inf if num_requests is None else num_requests
        max_s = math.inf if duration_s is None else duration_s
        draw = self._chunks(rng)
        count, end_s = 0, 0.0
        while count < max_count and end_s < max_s:
            chunk = draw()
            end_s = float(chunk[-1]) if len(chunk) else end_s
            kept = _cut(chunk, None if num_requests is None else num_requests - count, duration_s)
            count += len(chunk)
            yield kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Poisson(_Drawn):
    """Poisson process: independent exponential gaps."""

    rate_per_s: float

    def __post_init__(self) -> None:
        require_positive(self, "rate_per_s")

    def _chunks(self, rng: np.random.Generator) -> Draw:
        return _running_sum(lambda: rng.exponential(1 / self.rate_per_s, CHUNK))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gamma(_Drawn):
    """Gamma-distributed gaps with coefficient of variation cv: 1 is Poisson, above 1 bursty, below 1 regular.

    vLLM's benchmark calls 1 / cv^2 the burstiness: its 0.25 is cv=2 here. Unlike vLLM's, the gaps are not
    rescaled to a total time, which would change their variance.
    """

    rate_per_s: float
    cv: float

    def __post_init__(self) -> None:
        require_positive(self, "rate_per_s", "cv")
        require_at_most(self, MAX_CV, "cv")
        if self.cv < 1 / MAX_CV:
            raise ValueError(
                f"cv={self.cv}: must be >= {1 / MAX_CV:g}; for equal gaps choose arrivals: constant"
            )

    def _chunks(self, rng: np.random.Generator) -> Draw:
        shape = self.cv**-2
        return _running_sum(lambda: rng.gamma(shape, 1 / (shape * self.rate_per_s), CHUNK))


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant(_InChunks):
    """Equal gaps: request k, counted from 0, arrives at k / rate_per_s."""

    rate_per_s: float

    def __post_init__(self) -> None:
        require_positive(self, "rate_per_s")

    def chunks_s(
        self, rng: np.random.Generator, *, num_requests: int | None, duration_s: float | None
    ) -> Iterator[FloatArray]:
        in_time = math.inf if duration_s is None else math.ceil(duration_s * self.rate_per_s) + 1
        count = int(min(in_time, math.inf if num_requests is None else num_requests))
        for first in range(0, count, CHUNK):
            yield _cut(np.arange(first, min(first + CHUNK, count)) / self.rate_per_s, None, duration_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllAtOnce(_InChunks):
    """Offline batch: all requests arrive at 0 s."""

    def chunks_s(
        self, rng: np.random.Generator, *, num_requests: int | None, duration_s: float | None
    ) -> Iterator[FloatArray]:
        if num_requests is None:
            raise ValueError(
                "num_requests=null: must be set, because all requests arrive at 0 s and no duration ends them"
            )
        for first in range(0, num_requests, CHUNK):
            yield np.zeros(min(CHUNK, num_requests - first))


@dataclass(frozen=True, kw_only=True, slots=True)
class OnOff(_Drawn):
    """Bursts: Poisson at rate_on_per_s for on_s seconds, then at rate_off_per_s for off_s, in turn."""

    rate_on_per_s: float
    rate_off_per_s: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        require_positive(self, "rate_on_per_s", "on_s", "off_s")
        require_not_negative(self, "rate_off_per_s")

    def _chunks(self, rng: np.random.Generator) -> Draw:
        return _repeating_steps(rng, [self.rate_on_per_s, self.rate_off_per_s], [self.on_s, self.off_s])


@dataclass(frozen=True, kw_only=True, slots=True)
class PerMinute(_Drawn):
    """Poisson arrivals at a rate that follows counts per minute; after the last minute the counts repeat.

    rate_scale multiplies every rate.
    """

    requests_per_minute: tuple[float, ...]
    rate_scale: float = 1.0

    def __post_init__(self) -> None:
        counts = tuple(float(count) for count in self.requests_per_minute)
        object.__setattr__(self, "requests_per_minute", counts)
        require_positive(self, "rate_scale")
        if not all(0 <= count < math.inf for count in counts) or not sum(counts) > 0:
            raise ValueError(f"requests_per_minute={list(counts)}: must be finite, >= 0 and not all 0")

    def _chunks(self, rng: np.random.Generator) -> Draw:
        rates_per_s = [count * self.rate_scale / 60.0 for count in self.requests_per_minute]
        return _repeating_steps(rng, rates_per_s, [60.0] * len(rates_per_s))


@dataclass(frozen=True, kw_only=True, slots=True)
class Diurnal(_Drawn):
    """Daily cycle: Poisson with a rate that follows a cosine, with its minimum at 0 s.

    rate(t) = mean (1 - a cos(2 pi t / period)), a = (ratio - 1) / (ratio + 1), so that peak / trough = ratio.
    Drawn by thinning (Lewis and Shedler, 1979): candidates at the peak rate, each kept with probability
    rate(t) / peak rate.
    """

    mean_rate_per_s: float
    peak_to_trough_ratio: float
    period_s: float = 86_400.0

    def __post_init__(self) -> None:
        require_positive(self, "mean_rate_per_s", "period_s")
        if not 1 <= self.peak_to_trough_ratio < math.inf:
            raise ValueError(f"peak_to_trough_ratio={self.peak_to_trough_ratio}: must be finite and >= 1")

    def _chunks(self, rng: np.random.Generator) -> Draw:
        swing = (self.peak_to_trough_ratio - 1) / (self.peak_to_trough_ratio + 1)
        peak_per_s = self.mean_rate_per_s * (1 + swing)
        candidates = _running_sum(lambda: rng.exponential(1 / peak_per_s, CHUNK))

        def draw() -> FloatArray:
            times_s = candidates()
            rate_per_s = self.mean_rate_per_s * (1 - swing * np.cos(2 * np.pi * times_s / self.period_s))
            kept: FloatArray = times_s[rng.random(CHUNK) * peak_per_s < rate_per_s]
            return kept

        return draw


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedLoop:
    """A number of users with one request at a time.

    The next request follows think_time_s after the last one ends.

    Without a think time, num_users requests are always in flight (vLLM's `--max-concurrency`). Workloads of
    sessions have one session per user at a time. The first ones are spread evenly over ramp_up_s.
    """

    num_users: int
    think_time_s: Distribution | None = None
    """Time in seconds between the end of an answer and the user's next request; None: 0 s."""
    ramp_up_s: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self, "num_users")
        require_not_negative(self, "ramp_up_s")

    def first_s(self, *, num_requests: int | None, duration_s: float | None) -> FloatArray:
        """Returns the arrival time of the first request of each user; later ones depend on the engine."""
        first_s = np.linspace(0.0, self.ramp_up_s, self.num_users, endpoint=False)
        return _cut(first_s, num_requests, duration_s)

    def think_s(self, z: FloatArray) -> FloatArray:
        """Maps standard normal scores to think times."""
        return np.zeros_like(z) if self.think_time_s is None else self.think_time_s.from_normal(z)


def _cut(times_s: FloatArray, num_requests: int | None, duration_s: float | None) -> FloatArray:
    within = times_s if duration_s is None else times_s[: np.searchsorted(times_s, duration_s)]
    return within[:num_requests]


def _running_sum(draw_gaps: Draw) -> Draw:
    """Returns a function that draws the next chunk of cumulative sums of gaps."""
    last_s = 0.0

    def draw() -> FloatArray:
        nonlocal last_s
        times_s = last_s + np.cumsum(draw_gaps())
        last_s = float(times_s[-1])
        return times_s

    return draw


def _repeating_steps(rng: np.random.Generator, rates_per_s: list[float], lengths_s: list[float]) -> Draw:
    """Returns a function that draws Poisson arrivals at the rates rates_per_s, each for lengths_s, in turn.

    Exact, by a change of time: an arrival of the unit-rate process at u occurs when the expected number of
    arrivals, a piecewise linear function of time, reaches u.
    """
    edges_s = np.concatenate([[0.0], np.cumsum(lengths_s)])
    expected = np.concatenate([[0.0], np.cumsum(np.multiply(rates_per_s, lengths_s))])
    unit_times = _running_sum(lambda: rng.exponential(1.0, CHUNK))

    def draw() -> FloatArray:
        rounds, rest = np.divmod(unit_times(), expected[-1])
        times_s = rounds * edges_s[-1] + np.interp(rest, expected, edges_s)
        return np.maximum.accumulate(times_s)  # keeps the times sorted despite rounding between rounds

    return draw
