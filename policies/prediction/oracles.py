"""Stand-ins for a trained predictor: they add errors to the true length. For the simulator only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import exp
from statistics import NormalDist
from typing import Annotated, ClassVar

from fieldlimits import Checked, Ge, Le, Share, check
from policies.core.request import Request
from policies.prediction import require_truth, uniform, within_limits

_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleWithNoise(Checked):
    """Predicts the true length times a lognormal error. It shows how accurate a predictor must be.

    This is a common model of inexact sizes in size-based scheduling (Dell'Amico, "Scheduling With Inexact Job
    Sizes", 2019).

        predicted = true * exp(error * z),    z standard normal

    For a true length of 100 and error=0.5, half of the predictions are above 100, and 68 % are between 61 and
    165. The median is exact, the mean is too large by the factor exp(error^2 / 2), here by 13 %.
    Assumes that errors are independent of everything, including the length; errors of a real model are not.
    """

    error: Annotated[
        float, Ge(0), Le(3), "with 3, every third prediction is wrong by more than a factor of 20"
    ] = 0.5
    """Standard deviation of log(predicted / true); 0: always exact."""
    seed: int = 0
    """Seed of the errors."""

    needs_truth: ClassVar[bool] = True

    def predict(self, request: Request, true_num_tokens: int | None) -> int:
        """Returns the true length times the error."""
        truth = require_truth(self, true_num_tokens)
        if not self.error:
            return within_limits(request, truth)
        z = _NORMAL.inv_cdf(uniform(self.seed, "prediction.oracle", request.request_id))
        return within_limits(request, round(truth * exp(self.error * z)))

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """Does nothing: the distribution of the errors is given."""


S3_ACCURACY = 0.7713
"""S3's accuracy on Google's Natural Questions; on the Pile, which has no questions, it is 0.656."""

_MAX_SUM_ERROR = 1e-6  # tolerance of a row's sum: rounding errors are allowed, a missing column is not


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketClassifier(Checked):
    """Predicts the upper bound of the bucket into which it classifies the output.

    It models a classifier of requests into output length buckets by its confusion matrix.

    S3 (Jin et al., NeurIPS 2023) fine-tunes DistilBERT to predict from the prompt one of ten buckets of equal
    width, and reserves the KV memory for the bucket's upper bound. The prediction here is therefore the upper
    bound. The true bucket i is classified as j with probability confusion[i][j].

        upper_bounds  100, 200, 400:  bucket 0 has 1..100 tokens, bucket 1 101..200, bucket 2 more than 200

    An output longer than the last bound is in the last bucket, and exceeds its prediction. Assumes that the
    probability of a misclassification depends only on the true bucket.
    """

    upper_bounds: tuple[int, ...] = (205, 410, 614, 819, 1024, 1229, 1434, 1638, 1843, 2048)
    """Longest output of each bucket, in tokens, ascending."""
    accuracy: Share | None = None
    """Share of each bucket that is classified correctly; the rest is classified as the neighbouring buckets.
    None: `confusion` is used or, if it is not given, 0.7713 (S3).
    """
    confusion: tuple[tuple[float, ...], ...] | None = None
    """Shares of a true bucket (row) classified as each bucket (column), instead of an accuracy."""
    seed: int = 0
    """Seed of the misclassifications."""
    _cumulative: tuple[tuple[float, ...], ...] = field(init=False, repr=False, compare=False)

    needs_truth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self)
        _check_bounds(self.upper_bounds)
        num_buckets = len(self.upper_bounds)
        if self.confusion is None:
            accuracy = S3_ACCURACY if self.accuracy is None else self.accuracy
            confusion = _mistaken_for_neighbours(num_buckets, accuracy)
        elif self.accuracy is None:
            _check_confusion(self.confusion, num_buckets)
            confusion = self.confusion
        else:
            raise ValueError(
                f"accuracy={self.accuracy}: must be null if confusion is given, which contains the accuracy"
            )
        object.__setattr__(self, "_cumulative", tuple(map(_cumulated, confusion)))

    def predict(self, request: Request, true_num_tokens: int | None) -> int:
        """Returns the upper bound of a bucket drawn from the true bucket's row of the confusion matrix."""
        truth = within_limits(request, require_truth(self, true_num_tokens))
        true_bucket = min(bisect_left(self.upper_bounds, truth), len(self.upper_bounds) - 1)
        draw = uniform(self.seed, "prediction.buckets", request.request_id)
        return within_limits(request, self.upper_bounds[bisect_right(self._cumulative[true_bucket], draw)])

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """Does nothing: the classifier is not trained during the run."""


def _mistaken_for_neighbours(num_buckets: int, accuracy: float) -> tuple[tuple[float, ...], ...]:
    """Returns the matrix with `accuracy` on the diagonal and the rest in equal parts on its two sides."""
    rows = []
    for true in range(num_buckets):
        neighbours = [bucket for bucket in (true - 1, true + 1) if 0 <= bucket < num_buckets]
        row = [0.0] * num_buckets
        row[true] = accuracy
        for bucket in neighbours:
            row[bucket] = (1 - accuracy) / len(neighbours)
        rows.append(tuple(row))
    return tuple(rows)


def _cumulated(row: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the running sums, the last exactly 1, so that every draw < 1 falls into a bucket."""
    sums = list(accumulate(row))
    return tuple(value / sums[-1] for value in sums)


def _check_bounds(bounds: tuple[int, ...]) -> None:
    shown = f"upper_bounds={list(bounds)}"
    if len(bounds) < 2:
        raise ValueError(f"{shown}: must be at least two buckets")
    if bounds[0] < 1:
        raise ValueError(f"{shown}: must be >= 1 token, found {bounds[0]}")
    for lower, upper in pairwise(bounds):
        if upper <= lower:
            raise ValueError(f"{shown}: must ascend, but {upper} follows {lower}")


def _check_confusion(confusion: tuple[tuple[float, ...], ...], num_buckets: int) -> None:
    if len(confusion) != num_buckets:
        raise ValueError(
            f"confusion: must have one row per bucket of upper_bounds ({num_buckets}), found {len(confusion)}"
        )
    for true, row in enumerate(confusion):
        shown = f"confusion[{true}]={list(row)}"
        if len(row) != num_buckets:
            raise ValueError(
                f"{shown}: must have one column per bucket of upper_bounds ({num_buckets}), found {len(row)}"
            )
        for share in row:
            if not 0 <= share < float("inf"):
                raise ValueError(f"{shown}: must be shares, >= 0, found {share}")
        if abs(sum(row) - 1) > _MAX_SUM_ERROR:
            raise ValueError(
                f"{shown}: must sum to 1, found {sum(row):g}; divide each row of a table of counts by its sum"
            )
