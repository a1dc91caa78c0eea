"""Estimates how long a pass of an engine that speculates takes, from the passes that it has measured.

    seconds = c0 + c1 n + c2 d + c3 T + c4 L,  all c >= 0
    n: sequences. d: draft tokens of all of them, the mean of those verified and those drafted for the next
    pass. T: tokens they attend to. L: levels that are drafted one after the other

The coefficients are fitted by least squares of the relative errors to the last measured passes and to those
of a warm-up, which differ in n and L as long runs of one draft length do not. Passes with prompt chunks are
not measured. Policies see the estimate only, so a decision depends on the engine's clock through the fits
alone: `PassTimes.fits` lists them, and `RecordedPassTimes` answers from such a list what the engine was
answered, pass by pass. A recording of a run must keep the list, which has plain numbers only, and a replay
must use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.plan import StepPlan
from policies.speculation import Proposer
from policies.speculation.engine.drafts import DraftPlan, Shapes
from realengine.runner.graphs import Drawn, Graphs
from realengine.runner.launch import Launch
from realengine.runner.warm_up import levels_of, pass_work, room_of
from realengine.runner.work import Draw, Padding, StepSize, Work

NUM_SEQS = (1, 8)
"""Numbers of sequences of the passes of a warm-up, as far as the engine has slots."""
NUM_RUNS = 3
"""Times that such a pass runs; the fastest counts, as the first ones compile kernels."""
WINDOW = 256
"""Number of the last measured passes that a fit counts."""
INTERVAL = 32
"""Number of measured passes between two fits."""
NUM_COEFFICIENTS = 5


class Fit(NamedTuple):
    """Coefficients that hold from a plan on."""

    from_iteration: int
    """Index of the first plan that is made with them."""
    coefficients: tuple[float, ...]


class MeasuredPass(NamedTuple):
    """Work of a pass, in the quantities of the formula."""

    num_seqs: int
    num_drafts: float
    num_tokens: int
    num_levels: int

    def features(self) -> tuple[float, ...]:
        """Returns the factors of the coefficients."""
        return 1.0, self.num_seqs, self.num_drafts, self.num_tokens, self.num_levels


class _Begun(NamedTuple):
    begin_s: float
    work: MeasuredPass | None
    num_iterations: int


class PassTimes:
    """Measures passes, and estimates others.

    proposer: says how many tokens a draft has by level. clock: gives seconds. `start` must be called first.
    """

    def __init__(self, proposer: Proposer, clock: Callable[[], float]) -> None:
        self._num_rows = Shapes(proposer).rows
        self.now = clock
        self.fits: list[Fit] = []
        self._anchors: list[tuple[MeasuredPass, float]] = []
        self._measured: deque[tuple[MeasuredPass, float]] = deque(maxlen=WINDOW)
        self._begun: deque[_Begun] = deque()
        self._num_new = 0
        self._next_index = 0  # of the next plan
        self._last_read_s = float("-inf")

    def start(self, warm_up: Iterable[tuple[MeasuredPass, float]]) -> None:
        """Begins with the passes and seconds of a warm-up, which every fit counts."""
        self._anchors = list(warm_up)
        self._fit()

    def begun(self, plan: StepPlan, begin_s: float, num_iterations: int = 1) -> None:
        """Notes passes that were launched together at a time."""
        drafts = plan.drafts
        assert isinstance(drafts, DraftPlan)
        self._next_index = plan.index + num_iterations
        work = None
        if not plan.chunks and drafts.seqs:
            num_drafts = (int(drafts.num_drafts.sum()) + int(drafts.next_drafts.sum())) / 2
            num_tokens = plan.num_decode_context_tokens
            work = MeasuredPass(len(drafts.seqs), num_drafts, num_tokens, drafts.next_levels)
        self._begun.append(_Begun(begin_s, work, num_iterations))

    def read(self) -> None:
        """Notes that the tokens of the oldest such passes are here.

        The device began them when they were launched, or when those before had ended.
        """
        begin_s, work, num_iterations = self._begun.popleft()
        now = self.now()
        seconds = (now - max(begin_s, self._last_read_s)) / num_iterations
        self._last_read_s = now
        if work is None or seconds <= 0:
            return
        self._measured.append((work, seconds))
        self._num_new += 1
        if self._num_new >= INTERVAL:
            self._fit()

    def __call__(self, num_seqs: int, num_tokens: int, num_drafts: int) -> float:
        """Estimates the seconds of a pass of (sequences, tokens they attend to, draft levels of each)."""
        return _seconds(self.fits[-1].coefficients, self._num_rows, num_seqs, num_tokens, num_drafts)

    def _fit(self) -> None:
        self._num_new = 0
        coefficients = fitted([*self._anchors, *self._measured])
        self.fits.append(Fit(self._next_index, coefficients))


class RecordedPassTimes:
    """Answers what an engine was answered: by its fits, and the index of the plan that is being made."""

    def __init__(self, proposer: Proposer, fits: SequenceOf[Fit], index: Callable[[], int]) -> None:
        self._num_rows = Shapes(proposer).rows
        self._fits = fits
        self._index = index

    def __call__(self, num_seqs: int, num_tokens: int, num_drafts: int) -> float:
        """Estimates the seconds of a pass, as `PassTimes` did."""
        index = self._index()
        fit = next(fit for fit in reversed(self._fits) if fit.from_iteration <= index)
        return _seconds(fit.coefficients, self._num_rows, num_seqs, num_tokens, num_drafts)


def measured_passes(
    execute: Callable[[Work], Drawn | None],
    now: Callable[[], float],
    proposer: Proposer,
    graphs: Graphs | None,
    padding: Padding,
    max_num_seqs: int,
    max_model_len: int,
) -> Iterator[tuple[MeasuredPass, float]]:
    """Runs passes without drafts and with as many as there are; yields each with its seconds.

    They run as in service: as graphs, if there are any of their size. Their contexts are so short that they
    count as 0 tokens: what a long one costs is measured in service. Their sequences are all in the padding
    slot, whose KV and tokens do not matter.
    """
    shapes = Shapes(proposer)
    for num_seqs in sorted({min(num, max_num_seqs) for num in NUM_SEQS}):
        for num_levels in levels_of(shapes, max_model_len):
            num_drafts = int(shapes.rows[num_levels])
            num_rows = num_seqs * (1 + num_drafts)
            graph = None if graphs is None else graphs.fit(num_seqs, num_rows, num_drafts, num_levels)
            size = (graph or StepSize(num_seqs, num_drafts, num_levels))._replace(num_levels=num_levels)
            room = room_of(num_drafts, shapes, max_model_len)
            work = replace(pass_work(size, room, Draw.greedy, padding, shapes), size=graph)
            seconds = []
            for _ in range(NUM_RUNS):
                begin_s = now()
                Launch([], execute(work), 1).tokens()
                seconds.append(now() - begin_s)
            if min(seconds) > 0:
                yield MeasuredPass(num_seqs, num_seqs * num_drafts, 0, num_levels), min(seconds)


def fitted(passes: SequenceOf[tuple[MeasuredPass, float]]) -> tuple[float, ...]:
    """Returns the coefficients >= 0 that estimate passes with the least sum of squared relative errors."""
    x_NF = np.array([work.features() for work, _ in passes])
    x_NF /= np.array([[seconds] for _, seconds in passes])
    scale_F = np.maximum(x_NF.max(axis=0), 1e-300)
    x_NF /= scale_F
    kept = np.flatnonzero(x_NF.any(axis=0))
    coefficients = np.zeros(NUM_COEFFICIENTS)
    while len(kept):
        found, *_ = np.linalg.lstsq(x_NF[:, kept], np.ones(len(passes)), rcond=1e-6)
        if (found >= 0).all():
            coefficients[kept] = found / scale_F[kept]
            break
        kept = np.delete(kept, np.argmin(found))  # the most negative one is taken as 0
    return tuple(coefficients.tolist())


def _seconds(
    coefficients: SequenceOf[float],
    num_rows: NDArray[np.int64],
    num_seqs: int,
    num_tokens: int,
    num_levels: int,
) -> float:
    work = MeasuredPass(num_seqs, num_seqs * int(num_rows[num_levels]), num_tokens, num_levels)
    return sum(each * factor for each, factor in zip(coefficients, work.features(), strict=True))
