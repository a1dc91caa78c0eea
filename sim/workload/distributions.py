"""Distributions of lengths, pauses and turns, each a monotone function of standard normal scores; checks.

As a sample is `from_normal(z)` with z ~ N(0, 1), two samples are correlated by correlating their scores (a
Gaussian copula), and the sample of a (user, turn) is found in a table of scores. A distribution has no unit:
the setting that holds it defines it as tokens or seconds.

Random numbers come from independent named streams: drawing more from one does not change another. `Lengths`
combines the distributions of prompts and outputs, clipped to the model's context.

Checks of workload settings name the key, its value, the rule and the unit.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

MAX_TOKENS = 1_000_000_000
"""Limit of one prompt or output: a thousand times the longest contexts; sums still fit in 64 bits."""
MAX_ARRIVAL_S = 1e9
"""Limit of an arrival after the start of a trace, 32 years; Unix times since 2001 are above it."""
MAX_CV = 1000.0
"""Limit of a coefficient of variation; the square of a larger one could overflow."""

MAX_REQUESTS = 1_000_000_000
"""Limit of the requests of a run: a billion take a day to simulate and a hundred GB to write."""
MAX_SESSIONS = 100_000_000
"""Limit of the sessions of a run, which have several requests each."""
MAX_USERS = 10_000_000
"""Limit of the users of a closed loop, each of which is kept in memory for the whole run."""
LIMITS: Mapping[str, tuple[float, str]] = {
    **dict.fromkeys(
        ("num_requests", "max_requests"),
        (MAX_REQUESTS, "more would be simulated for days; to raise the rate, set load"),
    ),
    **dict.fromkeys(
        ("num_conversations", "num_tasks", "max_sessions"),
        (MAX_SESSIONS, "more would be simulated for days; to raise the rate, set load"),
    ),
    "num_users": (MAX_USERS, "each user is kept in memory for the whole run"),
    "duration_s": (MAX_ARRIVAL_S, "which is 32 years"),
}
"""Name of a setting -> its largest value and the reason, in words."""

_UNITS = (
    ("tokens_per_s", " tokens/s"),
    ("_per_s", " requests/s"),
    ("_s", " s"),
    ("_tokens", " tokens"),
)  # first match wins


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Distribution(Protocol):
    """Settings of a distribution of numbers >= 0."""

    def from_normal(self, z: FloatArray) -> FloatArray:
        """Computes the sample of each standard normal score; it never decreases with z. Same shape as z."""
        ...

    def magnitudes(self) -> dict[str, float]:
        """Returns the settings that have the unit of the samples, by name, for checks of their range."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """The constant `value`."""

    value: float

    def __post_init__(self) -> None:
        require_not_negative(self, "value")

    def from_normal(self, z: FloatArray) -> FloatArray:
        return np.full(z.shape, float(self.value))

    def magnitudes(self) -> dict[str, float]:
        return {"value": self.value}


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform:
    """The integers from low to high, inclusive, with equal probability."""

    low: int
    high: int

    def __post_init__(self) -> None:
        require_not_negative(self, "low", "high")
        if self.high < self.low:
            raise ValueError(f"high={self.high}: must be >= low={self.low}")

    def from_normal(self, z: FloatArray) -> FloatArray:
        steps: FloatArray = np.floor((self.high - self.low + 1) * normal_cdf(z))
        return np.minimum(self.low + steps, float(self.high))

    def magnitudes(self) -> dict[str, float]:
        return {"low": self.low, "high": self.high}


@dataclass(frozen=True, kw_only=True, slots=True)
class Exponential:
    """Exponential distribution with the given mean."""

    mean: float

    def __post_init__(self) -> None:
        require_positive(self, "mean")

    def from_normal(self, z: FloatArray) -> FloatArray:
        return -self.mean * np.log(normal_cdf(-z))

    def magnitudes(self) -> dict[str, float]:
        return {"mean": self.mean}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lognormal:
    """Lognormal distribution with the given mean and coefficient of variation cv = standard deviation / mean.

    sigma^2 = ln(1 + cv^2), mu = ln(mean) - sigma^2 / 2, so the median is mean / sqrt(1 + cv^2).
    Example: mean=1000, cv=1: sigma = 0.833, median 707, 99th percentile exp(mu + 2.326 sigma) = 4,907.
    """

    mean: float
    cv: float

    def __post_init__(self) -> None:
        require_positive(self, "mean", "cv")
        require_at_most(self, MAX_CV, "cv")

    def from_normal(self, z: FloatArray) -> FloatArray:
        variance = math.log1p(self.cv**2)
        return np.exp(math.log(self.mean) - variance / 2 + math.sqrt(variance) * z)

    def magnitudes(self) -> dict[str, float]:
        return {"mean": self.mean}


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometric:
    """Geometric distribution from 1: each turn is followed by another with probability 1 - 1 / mean."""

    mean: float

    def __post_init__(self) -> None:
        if not 1 <= self.mean < math.inf:
            raise ValueError(f"mean={self.mean}: must be finite and >= 1")

    def from_normal(self, z: FloatArray) -> FloatArray:
        if self.mean == 1:
            return np.ones(z.shape)
        return np.maximum(np.ceil(np.log(normal_cdf(-z)) / math.log1p(-1 / self.mean)), 1.0)

    def magnitudes(self) -> dict[str, float]:
        return {"mean": self.mean}


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Empirical distribution: values[i] is the quantile at probabilities[i], linear in between.

    The probabilities go from 0 (the minimum) to 1 (the maximum).
    """

    probabilities: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("probabilities", "values"):  # YAML gives lists, a frozen object needs tuples
            object.__setattr__(self, name, tuple(float(number) for number in getattr(self, name)))
        p, values = self.probabilities, self.values
        if len(p) != len(values):
            raise ValueError(
                f"values: {len(values)} numbers for {len(p)} probabilities; must be equally many"
            )
        if len(p) < 2 or p[0] != 0 or p[-1] != 1 or not all(a < b for a, b in pairwise(p)):
            raise ValueError(f"probabilities={list(p)}: must increase from 0 to 1")
        if not (values[0] >= 0 and values[-1] < math.inf and all(a <= b for a, b in pairwise(values))):
            raise ValueError(f"values={list(values)}: must be finite, >= 0 and not decreasing")

    def from_normal(self, z: FloatArray) -> FloatArray:
        return np.interp(normal_cdf(z), self.probabilities, self.values)

    def magnitudes(self) -> dict[str, float]:
        return {"values[0]": self.values[0], "values[-1]": self.values[-1]}


def normal_cdf(z: FloatArray) -> FloatArray:
    """Computes the standard normal distribution function of each score, also accurate in the lower tail.

    math.erfc over a list takes 0.1 us per score and avoids importing scipy.
    """
    scaled = (z.ravel() / -math.sqrt(2.0)).tolist()
    return 0.5 * np.fromiter(map(math.erfc, scaled), np.float64, z.size).reshape(z.shape)


def whole_numbers(distribution: Distribution, z: FloatArray, maximum: int = MAX_TOKENS) -> IntArray:
    """Computes samples rounded to integers from 1 to `maximum`, for numbers of tokens or turns."""
    return np.clip(np.rint(distribution.from_normal(z)), 1, maximum).astype(np.int64)


def stream(seed: int, name: str, *keys: int) -> np.random.Generator:
    """Returns the generator of the stream `name` (sub-stream `keys`) of the run `seed`; seed, keys >= 0."""
    entropy = [seed, zlib.crc32(name.encode())]
    return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=keys))


def zipf_draws(rng: np.random.Generator, num: int, skew: float, count: int) -> IntArray:
    """Draws `count` numbers from 0 to num - 1; number k has a weight of (k + 1)^-skew; 0: all are equal."""
    weights = np.arange(1.0, num + 1) ** -skew
    upper = np.cumsum(weights / weights.sum())[:-1]
    return np.searchsorted(upper, rng.random(count), side="right").astype(np.int64)


BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Prompt and output lengths in tokens, correlated by a Gaussian copula.

    rank_correlation is Spearman's rho between the two lengths; the normal scores of the copula have the
    correlation r = 2 sin(pi rho / 6) (Kruskal, JASA 1958): rho = 0.5 gives r = 0.518. With many equal lengths
    (Fixed, a narrow Uniform) the correlation of the lengths is lower.
    """

    prompt_tokens: Distribution
    output_tokens: Distribution
    rank_correlation: float = 0.0

    def __post_init__(self) -> None:
        require_counts(self, MAX_TOKENS, "tokens", "prompt_tokens", "output_tokens")
        if not -1 <= self.rank_correlation <= 1:
            raise ValueError(f"rank_correlation={self.rank_correlation}: must be between -1 and 1")

    def from_normal(self, z_N2: FloatArray) -> tuple[IntArray, IntArray]:
        """Returns prompt tokens [N] and output tokens [N], each >= 1, for N pairs of normal scores."""
        r = 2 * math.sin(math.pi * self.rank_correlation / 6)
        z_output_N = r * z_N2[:, 0] + math.sqrt(max(0.0, 1 - r * r)) * z_N2[:, 1]
        return whole_numbers(self.prompt_tokens, z_N2[:, 0]), whole_numbers(self.output_tokens, z_output_N)


def clip_to_context(
    prompt_tokens: IntArray, output_tokens: IntArray, max_model_len: int
) -> tuple[IntArray, IntArray, BoolArray]:
    """Shortens requests to max_model_len tokens; returns prompts, outputs, and which were shortened, all [N].

    As in Vidur, the prompt is cut first, down to 1 token, and only then the output. Raises ValueError if
    max_model_len < 2.
    """
    if max_model_len < 2:
        raise ValueError(
            f"max_model_len={max_model_len}: must be >= 2 tokens, one of prompt and one of output"
        )
    outputs = np.minimum(output_tokens, max_model_len - 1)
    prompts = np.minimum(prompt_tokens, max_model_len - outputs)
    return prompts, outputs, prompt_tokens + output_tokens > max_model_len


def require_positive(settings: object, *names: str) -> None:
    """Raises ValueError for the first named field that is set (not None) and not a finite number > 0."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: must be finite and > 0{_unit(name)}")
        if value is not None and name in LIMITS:
            most, reason = LIMITS[name]
            if value > most:
                raise ValueError(f"{name}={value:.6g}: must be <= {most:,.0f}{_unit(name)}; {reason}")


def require_not_negative(settings: object, *names: str) -> None:
    """Raises ValueError for the first named field that is set (not None) and not a finite number >= 0."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}: must be finite and >= 0{_unit(name)}")


def require_at_most(settings: object, maximum: float, *names: str) -> None:
    """Raises ValueError for the first named field above `maximum`."""
    for name in names:
        value = getattr(settings, name)
        if value > maximum:
            raise ValueError(f"{name}={value}: must be <= {maximum:g}{_unit(name)}")


class _Sized(Protocol):
    def magnitudes(self) -> Mapping[str, float]: ...


def require_counts(settings: object, maximum: int, unit: str, *names: str) -> None:
    """Raises ValueError for the first named distribution with a magnitude outside [1, maximum].

    A magnitude below 1 is an error because samples are rounded up to 1.
    """
    for name in names:
        distribution: _Sized = getattr(settings, name)
        for key, value in distribution.magnitudes().items():
            if not 1 <= value <= maximum:
                raise ValueError(f"{name}.{key}={value:.15g}: must be >= 1 and <= {maximum:,} {unit}")


def _unit(name: str) -> str:
    return next((unit for suffix, unit in _UNITS if name.endswith(suffix)), "")
