"""A classifier of answers into length buckets, given by its confusion matrix. For the simulator only.

S3 (Jin et al., NeurIPS 2023) fine-tunes DistilBERT to predict the bucket, ten of equal width up to the
longest answer, from the prompt, and gives a request the KV memory of the bucket's upper bound: so the upper
bound is what is predicted here. A true bucket i is classified as j with probability confusion[i][j].

    upper_bounds  100, 200, 400:  bucket 0 holds 1..100 tokens, 1 holds 101..200, 2 all that is longer

An answer longer than the last bound is in the last bucket, and exceeds its prediction.
Assumes that whether a request is misclassified depends on its bucket only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import ClassVar

from policies.core.request import Request
from policies.prediction import require_truth, within_limits
from policies.prediction.draws import uniform

S3_ACCURACY = 0.7713
"""S3's accuracy on Google's Natural Questions; on the Pile, no questions and answers, it is 0.656."""

_MAX_SUM_ERROR = 1e-6  # of a row: allows rounding, not a forgotten column


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketClassifier:
    """Predicts the upper bound of the bucket into which it classifies the answer."""

    upper_bounds: tuple[int, ...] = (205, 410, 614, 819, 1024, 1229, 1434, 1638, 1843, 2048)
    """Longest answer of each bucket, in tokens, ascending."""
    accuracy: float | None = None
    """Share of each bucket classified correctly, the rest as its neighbours. None.

    0.7713 (S3) or confusion's.
    """
    confusion: tuple[tuple[float, ...], ...] | None = None
    """Shares of a true bucket (row) classified as each bucket (column), in place of an accuracy."""
    seed: int = 0
    """Seed of the mistakes."""
    _cumulative: tuple[tuple[float, ...], ...] = field(init=False, repr=False, compare=False)

    needs_truth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_bounds(self.upper_bounds)
        num_buckets = len(self.upper_bounds)
        if self.confusion is None:
            accuracy = S3_ACCURACY if self.accuracy is None else self.accuracy
            if not 0 <= accuracy <= 1:
                raise ValueError(f"accuracy={accuracy}: must be a share, >= 0 and <= 1")
            confusion = _mistaken_for_neighbours(num_buckets, accuracy)
        elif self.accuracy is None:
            _check_confusion(self.confusion, num_buckets)
            confusion = self.confusion
        else:
            raise ValueError(
                f"accuracy={self.accuracy}: must be null where confusion is given, which says it already"
            )
        object.__setattr__(self, "_cumulative", tuple(map(_cumulated, confusion)))

    def predict(self, request: Request, true_num_tokens: int | None) -> int:
        """The upper bound of the bucket drawn for the true one."""
        truth = within_limits(request, require_truth(self, true_num_tokens))
        true_bucket = min(bisect_left(self.upper_bounds, truth), len(self.upper_bounds) - 1)
        draw = uniform(self.seed, "prediction.buckets", request.request_id)
        return within_limits(request, self.upper_bounds[bisect_right(self._cumulative[true_bucket], draw)])

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """Does nothing: the classifier is not trained during the run."""


def _mistaken_for_neighbours(num_buckets: int, accuracy: float) -> tuple[tuple[float, ...], ...]:
    """The matrix with `accuracy` on the diagonal and the rest beside it, in equal parts on both sides."""
    rows = []
    for true in range(num_buckets):
        beside = [bucket for bucket in (true - 1, true + 1) if 0 <= bucket < num_buckets]
        row = [0.0] * num_buckets
        row[true] = accuracy
        for bucket in beside:
            row[bucket] = (1 - accuracy) / len(beside)
        rows.append(tuple(row))
    return tuple(rows)


def _cumulated(row: tuple[float, ...]) -> tuple[float, ...]:
    """Running sums, the last exactly 1, so that every draw < 1 falls into a bucket with a share."""
    sums = list(accumulate(row))
    return tuple(value / sums[-1] for value in sums)


def _check_bounds(bounds: tuple[int, ...]) -> None:
    shown = f"upper_bounds={list(bounds)}"
    if len(bounds) < 2:
        raise ValueError(f"{shown}: must be at least two; in one bucket there is nothing to tell apart")
    if bounds[0] < 1:
        raise ValueError(f"{shown}: must be >= 1 token, found {bounds[0]}")
    for lower, upper in pairwise(bounds):
        if upper <= lower:
            raise ValueError(f"{shown}: must ascend, but {upper} follows {lower}")


def _check_confusion(confusion: tuple[tuple[float, ...], ...], num_buckets: int) -> None:
    if len(confusion) != num_buckets:
        raise ValueError(
            f"confusion: must have a row for each of the {num_buckets} upper_bounds, found {len(confusion)}"
        )
    for true, row in enumerate(confusion):
        shown = f"confusion[{true}]={list(row)}"
        if len(row) != num_buckets:
            raise ValueError(
                f"{shown}: must have a column for each of the {num_buckets} upper_bounds, found {len(row)}"
            )
        for share in row:
            if not 0 <= share < float("inf"):
                raise ValueError(f"{shown}: must be shares, >= 0, found {share}")
        if abs(sum(row) - 1) > _MAX_SUM_ERROR:
            raise ValueError(
                f"{shown}: must sum to 1, found {sum(row):g}; divide each row of a table of counts by its sum"
            )
