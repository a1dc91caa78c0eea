"""Traffic of many clients as described by ServeGen: drawn from published statistics, or from its data.

Xiang et al., "ServeGen", NSDI 2026, report on the traffic of a model service (M-small): 29 of its 2,412
clients send 90 % of the requests; gaps are burstier than Poisson's (a coefficient of variation above 1) and
are fitted by Gamma or Weibull distributions; prompts follow a lognormal body with a Pareto tail and outputs
an exponential distribution; and lengths differ between clients. Here the k-th largest client sends a share of
the requests proportional to k^-client_skew: with 2,412 clients, a skew of 1.57 gives 29 of them 90 %.

The data are a folder with two files per client (a "chunk"):

    chunk-3-trace.csv      timestamp, rate, cv, pattern, two arguments of the pattern; bins of 10 minutes
    chunk-3-dataset.json   timestamp -> probabilities of input_tokens and of output_tokens

In each bin a client sends rate x length requests; the gaps have the pattern's shape (Gamma: 1 / cv^2;
Weibull: the first argument) and are scaled to fill the bin, which keeps the rate exact. Lengths are those of
the latest entry of the dataset.

A drawn client was active before the traffic begins, so the time to its first request is the rest of a gap in
progress. The gap that covers a given time has the density x f(x) / mean (longer gaps are more likely), and
the time is uniform in it (Feller, "An Introduction to Probability Theory", volume 2, chapter XI.4).
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sim.workload.base import Source
from sim.workload.chunks import TableSource, objects
from sim.workload.distributions import (
    MAX_ARRIVAL_S,
    MAX_CV,
    MAX_TOKENS,
    Distribution,
    FloatArray,
    IntArray,
    require_counts,
    require_not_negative,
    require_positive,
    stream,
)
from sim.workload.trace_columns import MAX_SHOWN, shown
from sim.workload.trace_files import lines_of
from sim.workload.trace_tables import CsvRow

MAX_PER_CLIENT = 20_000_000
"""Limit of the expected requests of one client, which is 160 MB of times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaps:
    """Distribution of the gaps between requests: a shape, and a scale in seconds."""

    pattern: str
    """Gamma or Weibull."""
    shape: float
    scale_s: float

    @classmethod
    def of_gamma(cls, rate_per_s: float, cv: float) -> Gaps:
        """Returns Gamma gaps with a rate and a coefficient of variation: shape 1 / cv^2."""
        return cls(pattern="Gamma", shape=cv**-2, scale_s=cv**2 / rate_per_s)

    @property
    def mean_s(self) -> float:
        """Mean gap, s."""
        of_one = self.shape if self.pattern == "Gamma" else math.gamma(1 + 1 / self.shape)
        return self.scale_s * of_one

    def draw(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Draws gaps in seconds."""
        if self.pattern == "Gamma":
            return rng.gamma(self.shape, self.scale_s, count)
        return self.scale_s * rng.weibull(self.shape, count)

    def first_s(self, rng: np.random.Generator) -> float:
        """Draws the seconds until the first request, the rest of a gap in progress."""
        # x f(x) of a Gamma is a Gamma with shape + 1; of a Weibull, (x / scale)^shape is a Gamma.
        if self.pattern == "Gamma":
            covering = rng.gamma(self.shape + 1, self.scale_s)
        else:
            covering = self.scale_s * rng.gamma(1 + 1 / self.shape) ** (1 / self.shape)
        return float(covering * rng.random())


def renewal_times_s(gaps: Gaps, rng: np.random.Generator, duration_s: float) -> FloatArray:
    """Draws the arrival times of a client in [0, duration_s), sorted.

    Raises ValueError if too many are expected to fit in memory.
    """
    expected = duration_s / gaps.mean_s
    if not expected <= MAX_PER_CLIENT:
        raise ValueError(
            f"{expected:.3g} requests of one client in {duration_s:g} s: must be <= {MAX_PER_CLIENT:,}; "
            "lower the rate or the duration"
        )
    chunk = max(8, int(expected * 1.2))
    return _until(gaps.first_s(rng), lambda: gaps.draw(rng, chunk), duration_s)


def _until(first_s: float, draw: Callable[[], FloatArray], duration_s: float) -> FloatArray:
    """Sums gaps, chunk by chunk, up to duration_s."""
    parts = [np.array([first_s])]
    while parts[-1][-1] < duration_s:
        parts.append(parts[-1][-1] + np.cumsum(draw()))
    times_s = np.concatenate(parts)
    return times_s[: np.searchsorted(times_s, duration_s)]


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
    """Requests/s of all clients in total."""
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
        prompts, outputs = self._lengths(seed, means_N2[client_R])
        names = objects([f"client-{client}" for client in range(self.num_clients)])
        return TableSource.clipped(
            arrival_s=arrival_s,
            prompt_tokens=prompts,
            output_tokens=outputs,
            max_model_len=max_model_len,
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


CHUNK = re.compile(r"chunk-(\d+)-trace\.csv")
BIN_S = 600.0
MAX_REQUESTS = 20_000_000
FIELDS = ("timestamp", "rate", "cv", "pattern")
ARGUMENT = "first argument of the pattern"


class Bin(NamedTuple):
    """The traffic of a client from start_s on, for at most BIN_S seconds; gaps None: none."""

    start_s: float
    rate_per_s: float
    gaps: Gaps | None


class Entry(NamedTuple):
    """Lengths from start_s on: values, and cumulative probabilities."""

    start_s: float
    inputs: tuple[IntArray, FloatArray]
    outputs: tuple[IntArray, FloatArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeGenData:
    """The clients of a folder such as language/m-large, which are the tenants chunk-0, chunk-1, ...

    start_s and duration_s select a window of the data, whose start is 0 s of the run; max_requests limits it
    to the first ones.
    """

    path: Path
    start_s: float = 0.0
    duration_s: float = BIN_S
    max_requests: int | None = None
    patience_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser())
        require_not_negative(self, "start_s")
        require_positive(self, "duration_s", "max_requests", "patience_s")
        if not self.path.is_dir():
            raise ValueError(
                f"path={self.path}: must be a folder with chunk-0-trace.csv, chunk-0-dataset.json, ..."
            )

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic of the window. Raises ValueError with file, line and column for a bad value."""
        chunks = sorted(
            int(found[1]) for path in self.path.iterdir() if (found := CHUNK.fullmatch(path.name))
        )
        if not chunks:
            raise ValueError(f"path={self.path}: must have files such as chunk-0-trace.csv; found none")
        parts = [self._client(seed, chunk) for chunk in chunks]
        client_R = np.repeat(chunks, [len(part[0]) for part in parts])
        arrival_s, inputs, outputs = (np.concatenate(column) for column in zip(*parts, strict=True))
        if not len(arrival_s):
            raise ValueError(
                f"start_s={self.start_s:g}, duration_s={self.duration_s:g}: no client of {self.path} sends a "
                "request in this window"
            )
        order = np.argsort(arrival_s, kind="stable")[: self.max_requests]
        names = {chunk: f"chunk-{chunk}" for chunk in chunks}
        return TableSource.clipped(
            arrival_s=arrival_s[order],
            prompt_tokens=inputs[order],
            output_tokens=outputs[order],
            max_model_len=max_model_len,
            patience_s=self.patience_s,
            tenants=objects([names[client] for client in client_R[order].tolist()]),
        )

    def _client(self, seed: int, chunk: int) -> tuple[FloatArray, IntArray, IntArray]:
        """Draws the arrivals and the lengths of one client."""
        rng = stream(seed, "servegen", chunk)
        end_s = self.start_s + self.duration_s
        bins = [one for one in _bins(self.path / f"chunk-{chunk}-trace.csv") if one.start_s < end_s]
        bins = [one for one in bins if one.start_s + BIN_S > self.start_s and one.gaps is not None]
        times = [_times_s(one, rng) for one in bins]
        time_s = np.concatenate([np.empty(0), *times])
        time_s = time_s[(time_s >= self.start_s) & (time_s < end_s)]
        if not len(time_s):
            return time_s, np.empty(0, np.int64), np.empty(0, np.int64)
        entries = list(_entries(self.path / f"chunk-{chunk}-dataset.json"))
        which = np.searchsorted([one.start_s for one in entries], time_s, side="right") - 1
        lengths_2R = np.empty((2, len(time_s)), np.int64)
        for number, entry in enumerate(entries):
            rows = which == number if number else which <= 0
            for kind, (values, upto) in enumerate((entry.inputs, entry.outputs)):
                lengths_2R[kind, rows] = values[
                    np.searchsorted(upto, rng.random(int(rows.sum())), side="right")
                ]
        return time_s - self.start_s, lengths_2R[0], lengths_2R[1]


def _times_s(one: Bin, rng: np.random.Generator) -> FloatArray:
    """Draws the arrivals of a bin; the expected number is rounded up or down at random."""
    assert one.gaps is not None
    count = math.floor(one.rate_per_s * BIN_S + rng.random())
    sums = np.cumsum(one.gaps.draw(rng, count + 1))
    if not count or not sums[-1] > 0:
        return np.empty(0)
    times: FloatArray = one.start_s + BIN_S * sums[:-1] / sums[-1]
    return times


def _number(row: CsvRow, name: str, rule: str, low: float, high: float) -> float:
    """Returns a field as a number. Raises ValueError if it is not between low and high."""
    try:
        found = float(row.values[name])
    except ValueError:
        found = math.nan
    if not low <= found <= high:
        raise row.bad(name, rule, row.values[name])
    return found


def _gaps(row: CsvRow) -> Gaps:
    """Returns the gaps of a bin, with a scale of 1 s."""
    pattern = row.values["pattern"]
    if pattern == "Gamma":
        shape = _number(row, "cv", f"a number from 0.01 to {MAX_CV:g}", 0.01, MAX_CV) ** -2
    elif pattern != "Weibull":
        raise row.bad("pattern", "Gamma or Weibull", pattern)
    elif ARGUMENT not in row.values:
        raise row.bad("pattern", "Weibull and its shape after it", pattern)
    else:
        shape = _number(row, ARGUMENT, "a shape from 0.01 to 1000", 0.01, 1e3)
    return Gaps(pattern=pattern, shape=shape, scale_s=1.0)


def _bins(path: Path) -> Iterator[Bin]:
    """Yields the bins of a client in order of time."""
    last_s = -1.0
    for number, text in enumerate(lines_of(path), 1):
        texts = text.rstrip("\r\n").split(",")
        fields = [one.strip() for one in texts]
        if not text.strip() or (number == 1 and fields[0] == "timestamp"):
            continue
        if len(fields) < len(FIELDS):
            wanted = ", ".join(FIELDS)
            raise ValueError(
                f"{path}:{number}:1: expected {wanted}, arguments; found {text.strip()[:MAX_SHOWN]!r}"
            )
        names = [*FIELDS, ARGUMENT]
        row = CsvRow(path, number, dict(zip(names, fields, strict=False)), names, texts)
        start_s = _number(row, "timestamp", "a number of seconds", 0.0, MAX_ARRIVAL_S)
        if start_s <= last_s:
            raise row.bad("timestamp", f"more than {last_s:g}", fields[0])
        last_s = start_s
        most = MAX_REQUESTS / BIN_S
        rate = _number(row, "rate", f"requests/s from 0 to {most:g}", 0.0, most)
        yield Bin(start_s, rate, _gaps(row) if rate else None)


def _entries(path: Path) -> Iterator[Entry]:
    """Yields the entries of a dataset in order of time."""
    text = "".join(lines_of(path))
    try:
        dataset = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{error.lineno}:{error.colno}: expected a JSON object: {error.msg}"
        ) from None
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path}:1:1: expected a JSON object: {error}") from None
    if not isinstance(dataset, dict) or not dataset:
        raise ValueError(f"{path}:1:1: expected a JSON object of times, found {text.strip()[:MAX_SHOWN]!r}")
    for key in dataset:
        if not key.replace(".", "", 1).isdecimal():
            raise _bad(path, text, key, "a time in seconds as key", key)
    for key in sorted(dataset, key=float):
        entry = dataset[key]
        if not isinstance(entry, dict):
            raise _bad(path, text, key, "an object with input_tokens and output_tokens", entry)
        yield Entry(
            float(key),
            _probabilities(path, text, key, entry.get("input_tokens"), "input_tokens"),
            _probabilities(path, text, key, entry.get("output_tokens"), "output_tokens"),
        )


def _probabilities(path: Path, text: str, key: str, found: Any, name: str) -> tuple[IntArray, FloatArray]:
    """Returns the lengths of an entry, and their cumulative probabilities; lengths below 1 become 1."""
    table = found
    if isinstance(found, str):  # ServeGen writes the dictionary as a text
        try:
            table = ast.literal_eval(found)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            table = None
    rule = f"{name} with lengths up to {MAX_TOKENS:,} and their probabilities, such as {{100: 0.5, 200: 0.5}}"
    try:
        rows = [(int(length), float(share)) for length, share in table.items()]
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise _bad(path, text, key, rule, found) from None
    lengths, shares = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    is_sound = len(rows) and (shares >= 0).all() and 0 < shares.sum() < math.inf
    if not is_sound or lengths.min() < 0 or lengths.max() > MAX_TOKENS:
        raise _bad(path, text, key, rule, found)
    upto = np.cumsum(shares) / shares.sum()
    upto[-1] = 1.0
    return np.maximum(lengths, 1).astype(np.int64), upto


def _bad(path: Path, text: str, key: str, rule: str, found: object) -> ValueError:
    """Returns the error of an entry, at the place of its key."""
    before = text[: max(text.find(f'"{key}"'), 0)]
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    return ValueError(
        f"{path}:{line}:{column}: {shown(key)}: expected {rule}, found {str(found)[:MAX_SHOWN]!r}"
    )
