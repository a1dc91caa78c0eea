"""The shape of one iteration (a forward pass of a replica), models that price it, and timing jitter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log1p, nan
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fieldlimits import FINITE, Checked, Ge, Le, Lt, Positive, Unit
from hwmodels.exact import Num

COMPONENTS = ("gemm", "attention", "communication", "elementwise", "lm_head", "launch", "host")
"""Keys of every `IterationModel.breakdown`, in execution order."""


class AdapterBatch(NamedTuple):
    """Tokens and ranks of an iteration's LoRA adapters (Punica batches several).

    Fields are numbers or arrays.

    Ranks include the padding of the kernels.
    """

    adapters: Num
    """Number of different adapters."""
    tokens: Num
    """Number of tokens with an adapter."""
    rank_tokens: Num
    """Sum of the adapter's rank over these tokens: the amount of arithmetic."""
    ranks: Num
    """Sum of the ranks of the different adapters: the amount of weights read."""


class DraftWork(NamedTuple):
    """Draft tokens that an iteration verifies, and tokens drafted after it. Fields are numbers or arrays.

    A decoding sequence with K draft tokens has 1 + K rows in the pass, of which 1 to K + 1 become output
    tokens.
    """

    tokens: Num
    """Draft tokens verified, summed over sequences: rows in addition to the `decode_seqs` rows of next
    tokens.
    """
    pairs: Num
    """Query-key pairs of these rows, summed; a chain: rows (context + (rows + 1) / 2) per sequence."""
    seqs: Num
    """Sequences for which tokens are drafted after the pass."""
    steps: Num
    """Draft tokens of the longest draft: sequential passes of the draft model."""
    drafted: Num
    """Draft tokens made after the pass, summed over sequences."""


class Gathered(NamedTuple):
    """Totals over the ranks of data-parallel attention: the work of the layers that they share."""

    decode_seqs: Num
    prefill_seqs: Num
    prefill_tokens: Num
    draft_tokens: Num = 0


class IterationShape(NamedTuple):
    """The amount of work in one iteration (numbers), or in each of many (arrays).

    Fields broadcast against each other, so a leap of k decode iterations is six numbers and one array of k.
    At least one token is computed: decode_seqs + prefill_tokens >= 1.
    """

    decode_seqs: Num
    """Sequences that decode; each has one row, and one more for each of its draft tokens."""
    decode_context_tokens: Num
    """KV tokens that these sequences attend to, including one new token each, summed over sequences."""
    prefill_seqs: Num
    """Number of prompt chunks."""
    prefill_tokens: Num
    """New tokens of all chunks."""
    prefill_pairs: Num
    """Query-key pairs under the causal mask, summed over the chunks: see `causal_pairs`."""
    prefill_context_tokens: Num
    """Cached and new tokens, summed over the chunks."""
    sampled_seqs: Num
    """Rows through the LM head: decodes, draft tokens, and chunks that complete their prompt."""
    adapters: AdapterBatch | None = None
    """Work of LoRA adapters; None: no adapters."""
    drafts: DraftWork | None = None
    """Work of speculative decoding; None: no drafts."""
    gathered: Gathered | None = None
    """Totals over the ranks of data-parallel attention, if the ranks differ. The other fields then hold one
    rank's work times the number of ranks. None: the work is spread evenly.
    """

    @property
    def counts(self) -> tuple[Num, ...]:
        """The fields `COUNTED`."""
        return self[:7]

    @property
    def totals(self) -> Gathered:
        """The sequences and tokens of all ranks."""
        if self.gathered is not None:
            return self.gathered
        drafts = 0 if self.drafts is None else self.drafts.tokens
        return Gathered(self.decode_seqs, self.prefill_seqs, self.prefill_tokens, drafts)


COUNTED = IterationShape._fields[:7]
"""Numeric fields of an iteration: all but `adapters`, `drafts` and `gathered`."""


def causal_pairs(num_new_tokens: int, num_cached_tokens: Num = 0) -> Num:
    """Returns the query-key pairs of a chunk of n new tokens after c cached ones, under the causal mask.

    n c + n (n + 1) / 2. A whole prompt of 4 tokens has 10 pairs; its second half alone has 2 x 2 + 3 = 7. An
    array of cached tokens gives an array, for the same chunk size in many iterations.
    """
    n, c = num_new_tokens, num_cached_tokens
    return n * c + n * (n + 1) // 2


class Explained(NamedTuple):
    """Share of one operator in an iteration on one device; calls of the same name are summed."""

    operator: str
    component: str
    seconds: float
    share: float
    """Share of the iteration's time."""
    bound: str
    """compute, memory, communication or launch; host: time outside of operators."""
    flops: float
    bytes_moved: float
    calls: float


class UnknownIterationError(ValueError):
    """Raised for an iteration that a model cannot price, such as an unrecorded one."""


def counted(level: str, shape: IterationShape) -> tuple[Any, ...]:
    """Returns the fields of a plain iteration.

    Raises UnknownIterationError if it has adapters or draft tokens.
    """
    if shape.adapters is not None:
        raise UnknownIterationError(f"{level}: does not model LoRA adapters; choose latency=calibrated")
    if shape.drafts is not None:
        raise UnknownIterationError(f"{level}: does not model draft tokens; choose latency=calibrated")
    return shape.counts


def ends_of_decodes(
    seconds: Callable[[IterationShape], Any],
    start_s: float,
    num_seqs: int,
    num_context_tokens: int,
    num_iterations: int,
) -> list[float]:
    """Computes `IterationModel.decode_ends` from the `seconds` of shapes."""
    contexts = num_context_tokens + num_seqs * np.arange(num_iterations)
    durations_s = seconds(IterationShape(num_seqs, contexts, 0, 0, 0, 0, num_seqs))
    return list(accumulate(durations_s.tolist(), initial=start_s))[1:]


class IterationModel(Protocol):
    """Interface of all latency levels: data sheet, calibrated, table, recorded.

    Results have the broadcast shape of the fields of the argument. `seconds` of arrays equals, bit for bit,
    `seconds` of their elements one by one. The simulator relies on this to leap over iterations without
    changing any time. A model that cannot price an iteration raises UnknownIterationError. Among several
    iterations it returns NaN for that one, because a leap may be cut before it.
    """

    @property
    def peak_flops_per_s(self) -> float:
        """Dense peak of the compute dtype over all devices of the replica."""

    @property
    def peak_bytes_per_s(self) -> float:
        """Memory bandwidth of all devices of the replica."""

    def seconds(self, shape: IterationShape) -> Num:
        """Returns the wall time of the iteration."""

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive decode-only iterations of num_seqs sequences.

        The first starts at start_s and attends to num_context_tokens; in each further iteration every
        sequence attends to one more token. The `seconds` of each are added to the end of the previous one, up
        to the first iteration that the model cannot price. If that is the first of all, it raises
        UnknownIterationError.
        """

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component (`COMPONENTS`); they sum to `seconds`, up to rounding."""

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of one iteration, the longest first; their seconds sum to `seconds`."""

    def flops(self, shape: IterationShape) -> Num:
        """Returns the model FLOPs of the whole replica, for MFU.

        All tokens of the shape count as work, including those of a prefill repeated after a preemption,
        because the shape does not distinguish them. The padding of a CUDA graph does not count.
        """

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of weights and KV read by the whole replica, for MBU."""


class UnknownMachine:
    """An `IterationModel` of a machine without a description: its values are NaN."""

    peak_flops_per_s = nan
    peak_bytes_per_s = nan

    def seconds(self, shape: IterationShape) -> Num:
        return nan

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        return [nan] * num_iterations

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        return {"measured": 1.0}

    def explain(self, shape: IterationShape) -> list[Explained]:
        return []

    def flops(self, shape: IterationShape) -> Num:
        return shape.decode_seqs * nan

    def bytes_moved(self, shape: IterationShape) -> Num:
        return shape.decode_seqs * nan


BLOCK = 1024  # factors drawn at once
MAX_CV = 10.0
"""Limit of coefficients of variation: above it, the mean of any run is far below the distribution's mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Jitter(Checked):
    """Settings of the jitter of a replica's iterations.

        factor of iteration i = independent(i) x drift(i) x straggler(i), each with mean 1

        independent  lognormal: short disturbances, such as those of the host
        drift exp of a first-order autoregression: clocks, temperature, co-tenants; also lognormal straggler
        straggler_factor with probability straggler_share, else 1; both divided by their mean

    A lognormal factor with mean 1 and coefficient of variation c is exp(s z - s^2 / 2), s^2 = ln(1 + c^2).
    With c = 0.1, s = 0.0998, and 1 % of the factors are above exp(2.326 s - s^2 / 2) = 1.255. The factors are
    determined by the iteration number, so they do not depend on the number of iterations computed at once.
    """

    independent_cv: Annotated[float, Ge(0), Le(MAX_CV), "(a share of the mean)"] = 0.0
    """Coefficient of variation of the independent factors: standard deviation over mean."""
    drift_cv: Annotated[float, Ge(0), Le(MAX_CV), "(a share of the mean)"] = 0.0
    """Coefficient of variation of the slow drift."""
    drift_iterations: Positive = 1000.0
    """Number of iterations over which the correlation of the drift falls to 1/e."""
    straggler_share: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.0
    """Share of the iterations that are stragglers."""
    straggler_factor: Annotated[float, Ge(1), FINITE] = 2.0
    """Duration of a straggler, as a multiple of other iterations."""

    @property
    def sentence(self) -> str:
        """Returns the sentence of the reports that states the jitter."""
        text = f"With jitter: {100 * self.independent_cv:.3g} % from iteration to iteration"
        if self.drift_cv:
            text += f", a drift of {100 * self.drift_cv:.3g} % over {self.drift_iterations:g} iterations"
        if self.straggler_share:
            share, factor = 100 * self.straggler_share, self.straggler_factor
            text += f", {share:.3g} % of the iterations {factor:g} times as long"
        return f"{text}."


class JitterFactors:
    """The factors of one replica's iterations, drawn in blocks from the replica's own generator."""

    __slots__ = ("_drift", "_factors", "_first", "_jitter", "_rng")

    def __init__(self, jitter: Jitter, rng: np.random.Generator) -> None:
        self._jitter = jitter
        self._rng = rng
        self._drift = float(rng.standard_normal())
        self._first = 0
        self._factors: NDArray[np.float64] = np.empty(0)

    def of(self, first: int, count: int) -> NDArray[np.float64]:
        """Returns the factors of iterations first, ..., first + count - 1.

        `first` may not decrease from call to call, because earlier factors are dropped.
        """
        assert first >= self._first, f"iteration {first}: factors before {self._first} are forgotten"
        while self._first + len(self._factors) < first + count:
            ahead = min(first - self._first, len(self._factors))
            self._factors = np.concatenate([self._factors[ahead:], self._block()])
            self._first += ahead
        start = first - self._first
        return self._factors[start : start + count]

    def _block(self) -> NDArray[np.float64]:
        """Draws the factors of the next `BLOCK` iterations; all settings use the same number of draws."""
        jitter, rng = self._jitter, self._rng
        independent, innovations = rng.standard_normal((2, BLOCK))
        uniform = rng.random(BLOCK)
        correlation = exp(-1 / jitter.drift_iterations)
        steps = (np.sqrt(1 - correlation**2) * innovations).tolist()
        drift = list(accumulate(steps, lambda last, step: correlation * last + step, initial=self._drift))
        self._drift = drift[-1]
        mean = 1 + jitter.straggler_share * (jitter.straggler_factor - 1)
        straggler = np.where(uniform < jitter.straggler_share, jitter.straggler_factor, 1.0) / mean
        factors: NDArray[np.float64] = (
            _lognormal(independent, jitter.independent_cv)
            * _lognormal(np.array(drift[1:]), jitter.drift_cv)
            * straggler
        )
        return factors


def _lognormal(z: NDArray[np.float64], cv: float) -> NDArray[np.float64]:
    """Returns lognormal factors with mean 1 and this coefficient of variation, from standard normals."""
    variance = log1p(cv**2)
    factors: NDArray[np.float64] = np.exp(np.sqrt(variance) * z - variance / 2)
    return factors
