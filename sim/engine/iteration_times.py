"""Computes the end times of the iterations of a plan, with the hardware model.

A plan of the policies is converted to the iteration shape that the hardware models price. The iterations that
a replica is running (`RunningStep`) are one plan, repeated until the boundary at which it plans again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import accumulate, takewhile
from math import isnan
from operator import le
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hwmodels.exact import Num
from hwmodels.iterations import (
    AdapterBatch,
    DraftWork,
    Gathered,
    IterationModel,
    IterationShape,
    causal_pairs,
)
from hwmodels.iterations.layout import Pass, Pipeline, Stages
from policies.core.plan import Chunk, RankWork, StepPlan


def scaled_ends_s(
    model: IterationModel,
    plan: StepPlan,
    shape: IterationShape | None,
    num_iterations: int,
    start_s: float,
    factors: float | NDArray[np.float64],
    by_rank: bool = False,
) -> list[float]:
    """Returns the end time of each iteration of a plan, in seconds, summed one by one as in stepping.

    shape: the shape of the first iteration, if the plan has prompt chunks. factors: slowdown relative to the
    model: one number, or an array with one number per iteration; always a number for a single iteration.
    by_rank: see `seconds_of`. The list stops before the first iteration that the model cannot price, because
    the leap may be cut earlier. Raises UnknownIterationError if it cannot price the first one.
    """
    if num_iterations == 1:
        shape = shape or shape_of(plan, 0)
        return [float(start_s + factors * seconds_of(model, plan, shape, 0, by_rank))]
    steps = np.arange(num_iterations)
    seconds = np.asarray(seconds_of(model, plan, shape_of(plan, steps), steps, by_rank))
    durations_s = (factors * np.broadcast_to(seconds, num_iterations)).tolist()
    durations_s[0] += start_s
    ends = list(accumulate(durations_s))
    if isnan(ends[-1]):
        ends = list(takewhile(lambda end_s: not isnan(end_s), ends))
        if not ends:  # raises, and the message says what the model lacks
            model.seconds(shape_of(plan, 0))
    return ends


def seconds_of(model: IterationModel, plan: StepPlan, shape: IterationShape, step: Num, by_rank: bool) -> Num:
    """Returns the seconds of the plan's iteration `step`, or of each of an array of them.

    by_rank: ranks of data-parallel attention wait for the slowest rank. Otherwise the model prices the
    iteration of all ranks together.
    """
    if not (by_rank and plan.ranks):
        return model.seconds(shape)
    first, *others = shapes_of_ranks(plan, shape, step)
    seconds = model.seconds(first)
    for other in others:
        seconds = np.maximum(seconds, model.seconds(other))
    return seconds


class _StagedModel(Protocol):
    """A hardware model with pipeline stages."""

    stages: Stages

    def stage_times(self, shape: IterationShape) -> Pass:
        """Returns the times of one batch."""
        ...


class BatchTimes:
    """The end times of the batches of a pipeline, each on one stage at a time.

        planned   a b c         d           e       whenever there is room, and something to compute
        stage 1   |a|b|c|       |d|         |e|
        stage 2     |a|b|c|       |d|         |e|
        stage 3       |a|b|c|       |d|
        committed           a     b c         d

    A batch has its tokens when it leaves the last stage. Its time is the sum over the stages; each following
    batch ends later by the time of the slowest stage. `policies.core.parts` decides what is in a batch. In
    the records, an iteration begins when the previous one has ended or when it is planned, whichever is
    later. The rows of a replica therefore do not overlap, and the first row of a burst is the longest.
    """

    def __init__(self, model: IterationModel) -> None:
        self._model = cast(_StagedModel, model)
        self._pipeline = Pipeline(len(self._model.stages.all))

    def end_s(
        self, plan: StepPlan, shape: IterationShape | None, start_s: float, factor: float, by_rank: bool
    ) -> float:
        """Returns the end time of a batch that enters at start_s. Other arguments as for `scaled_ends_s`."""
        shape = shape or shape_of(plan, 0)
        shapes = shapes_of_ranks(plan, shape, 0) if by_rank and plan.ranks else [shape]
        slowest = max(map(self._model.stage_times, shapes), key=lambda times: sum(times.stage_s))
        return self._pipeline.enter(slowest, start_s, factor)


def shape_of(plan: StepPlan, step: Num) -> IterationShape:
    """Returns the shape of the plan's iteration `step` (from 0).

    An array of steps gives arrays where iterations differ: from one iteration to the next, a decode attends
    to one more token, and a chunk to the chunks before it.
    """
    context = plan.num_decode_context_tokens + plan.num_widening * step
    adapters = None if plan.adapters is None else AdapterBatch(*plan.adapters)
    return _shape(plan.num_decodes, context, plan.chunks, step, adapters)


def _shape(
    num_decodes: int, context: Num, chunks: SequenceOf[Chunk], step: Num, adapters: AdapterBatch | None
) -> IterationShape:
    """Returns the shape of decodes and of chunks that repeat."""
    num_sampled, num_tokens = num_decodes, 0
    num_pairs: Num = 0
    num_context: Num = 0
    for _, num_cached, n, completes in chunks:
        cached = num_cached + n * step
        num_tokens += n
        num_pairs = num_pairs + causal_pairs(n, cached)
        num_context = num_context + cached + n
        num_sampled += completes
    return IterationShape(
        num_decodes, context, len(chunks), num_tokens, num_pairs, num_context, num_sampled, adapters
    )


def shapes_of_ranks(plan: StepPlan, whole: IterationShape, step: Num) -> list[IterationShape]:
    """Returns the iteration's shape for each rank that may be the slowest; whole: its shape over all ranks.

    Each shape is a rank's work times the number of ranks, in addition to the totals: see
    `IterationShape.gathered`.
    """
    size, ranks = len(plan.ranks), _fullest(plan.ranks)
    drafts = whole.drafts
    if (
        len(ranks) == 1
        and ranks[0].num_decodes * size == plan.num_decodes
        and not plan.chunks
        and drafts is None
    ):
        context = ranks[0].num_decode_context_tokens + ranks[0].num_widening * step
        return [whole._replace(decode_context_tokens=size * context)]  # equal ranks
    totals = Gathered(*whole.totals)
    num_tokens = totals.decode_seqs + totals.prefill_tokens + totals.draft_tokens
    shapes = []
    for rank in ranks:
        context = rank.num_decode_context_tokens + rank.num_widening * step
        own = _shape(rank.num_decodes, context, rank.chunks, step, None)
        decodes, in_decodes, chunks, new, pairs, in_chunks, rows = (size * count for count in own.counts)
        of_drafts, adapters = None, whole.adapters
        if drafts is not None:
            of_drafts = _share_of(drafts, rank, size)
            rows = rows + of_drafts.tokens
        if adapters is not None:
            share = size * (own.decode_seqs + own.prefill_tokens + rank.num_draft_tokens) / num_tokens
            tokens, rank_tokens = adapters.tokens * share, adapters.rank_tokens * share
            adapters = adapters._replace(tokens=tokens, rank_tokens=rank_tokens)
        shape = IterationShape(
            decodes, in_decodes, chunks, new, pairs, in_chunks, rows, adapters, of_drafts, totals
        )
        shapes.append(shape)
    return shapes


def _share_of(drafts: DraftWork, rank: RankWork, size: int) -> DraftWork:
    """Returns a rank's draft tokens times the number of ranks; `next` counts those of all ranks."""
    return drafts._replace(tokens=size * rank.num_draft_tokens, pairs=size * rank.num_draft_pairs)


def _fullest(ranks: Iterable[RankWork]) -> list[RankWork]:
    """Returns the ranks that no other rank exceeds in every amount; equal ranks appear once."""
    works: dict[tuple[Num, ...], RankWork] = {}
    for rank in ranks:
        shape = _shape(rank.num_decodes, rank.num_decode_context_tokens, rank.chunks, 0, None)
        key = (*shape.counts, rank.num_widening, rank.num_draft_tokens, rank.num_draft_pairs)
        works[key] = rank
    fullest: dict[tuple[Num, ...], RankWork] = {}
    for key in sorted(works, reverse=True):  # what exceeds a key is before it
        if not any(all(map(le, key, other)) for other in fullest):
            fullest[key] = works[key]
    return list(fullest.values())


class RunningStep:
    """A plan with iterations that end at ends_s[0], ends_s[1], ...; it ends after num_iterations, at end_s.

    Several iterations are a leap. shape: the shape of the first iteration, if the plan has prompt chunks.
    """

    __slots__ = ("end_s", "ends_s", "num_iterations", "plan", "shape", "start_s")

    def __init__(
        self, plan: StepPlan, shape: IterationShape | None, start_s: float, ends_s: list[float]
    ) -> None:
        self.plan = plan
        self.shape = shape
        self.start_s = start_s
        self.ends_s = ends_s
        self.num_iterations = len(ends_s)
        self.end_s = ends_s[-1]

    def cut(self, num_iterations: int) -> None:
        """Makes the step end after its first num_iterations, at least one."""
        self.num_iterations = num_iterations
        self.end_s = self.ends_s[num_iterations - 1]

    @property
    def last_start_s(self) -> float:
        """Time at which its last iteration begins, s."""
        num_iterations = self.num_iterations
        return self.ends_s[num_iterations - 2] if num_iterations > 1 else self.start_s

    def boundary_s(self, now: float) -> float:
        """Returns the end of the first iteration that ends at `now` or later, s."""
        return self.ends_s[bisect_left(self.ends_s, now)]

    def num_ended(self, now: float) -> int:
        """Returns how many of its iterations have ended by `now`."""
        return bisect_right(self.ends_s, now, hi=self.num_iterations)

    def shape_of_iteration(self, step: int) -> IterationShape:
        """Returns the shape of its iteration `step` (from 0)."""
        return shape_of(self.plan, step) if step or self.shape is None else self.shape
