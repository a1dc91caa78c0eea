"""Predictors that know the true length and err as configured: the oracle with noise, the classifier."""

import re
from math import ceil, exp, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from policies.prediction.oracles import S3_ACCURACY, BucketClassifier, OracleWithNoise
from tests.policies.prediction.asked import BOUNDS, CONFUSION, NUM_DRAWS, STAND_INS, draws, lengths, request


@given(truth=lengths, request_id=st.integers(0, 10**9))
def test_an_oracle_without_error_is_right(truth, request_id):
    assert OracleWithNoise(error=0).predict(request(request_id), truth) == truth


@pytest.mark.parametrize("error", [0.1, 0.5, 1.0])
def test_the_oracles_errors_match_theory(error):
    """log(predicted / true) is normal with mean 0 and deviation `error`; a long answer hides the rounding."""
    errors = np.log(draws(OracleWithNoise(error=error), 10**9) / 10**9) / error
    assert stats.kstest(errors, "norm").pvalue > 0.001
    assert errors.std() == pytest.approx(1, rel=0.02)  # 4 standard errors: 4 / sqrt(2 * 20,000)
    assert errors.mean() == pytest.approx(0, abs=4 / sqrt(NUM_DRAWS))


def test_the_oracles_median_is_right_and_its_mean_too_large():
    """The docstring's numbers: error 0.5, 68 % between 61 and 165, the mean 13 % too large."""
    predicted = draws(OracleWithNoise(error=0.5), 100)
    assert np.median(predicted) == pytest.approx(100, abs=2)
    assert predicted.mean() == pytest.approx(100 * exp(0.5**2 / 2), rel=0.02)
    assert ((predicted >= 61) & (predicted <= 165)).mean() == pytest.approx(0.683, abs=0.015)


@pytest.mark.parametrize("error", [-0.1, 3.5, float("nan"), float("inf")])
def test_rejects_errors_outside_of_0_to_3(error):
    with pytest.raises(ValueError, match=f"^error={error}: must be >= 0 and <= 3"):
        OracleWithNoise(error=error)


@pytest.mark.parametrize("true_bucket", [0, 1, 2])
def test_the_confusion_matrix_is_reproduced(true_bucket):
    """Every share within its 99.9 % interval, and those of nothing never drawn."""
    predicted = draws(STAND_INS[1], BOUNDS[true_bucket] - 5)
    assert set(predicted) <= set(BOUNDS)
    for bound, share in zip(BOUNDS, CONFUSION[true_bucket], strict=True):
        half_width = 3.3 * sqrt(share * (1 - share) / NUM_DRAWS)
        assert (predicted == bound).mean() == pytest.approx(share, abs=half_width)


@pytest.mark.parametrize(
    ("truth", "bound"), [(1, 100), (100, 100), (101, 200), (200, 200), (400, 400), (401, 400), (9999, 400)]
)
def test_a_right_classifier_predicts_the_upper_bound_of_the_bucket(truth, bound):
    right = BucketClassifier(upper_bounds=BOUNDS, accuracy=1)
    assert set(draws(right, truth, 100)) == {bound}


def test_an_accuracy_leaves_the_rest_to_the_neighbours():
    wrong = BucketClassifier(upper_bounds=BOUNDS, accuracy=0.0)
    assert set(draws(wrong, 50, 100)) == {200}
    assert (draws(wrong, 150) == 100).mean() == pytest.approx(0.5, abs=3.3 * 0.5 / sqrt(NUM_DRAWS))
    assert set(draws(wrong, 150, 100)) == {100, 400}
    assert set(draws(wrong, 300, 100)) == {200}


def test_by_default_the_classifier_has_s3s_ten_buckets_and_its_accuracy():
    predictor = BucketClassifier()
    assert predictor.upper_bounds == tuple(ceil(2048 * i / 10 - 0.5) for i in range(1, 11))
    half_width = 3.3 * sqrt(S3_ACCURACY * (1 - S3_ACCURACY) / NUM_DRAWS)
    assert (draws(predictor, 700) == 819).mean() == pytest.approx(S3_ACCURACY, abs=half_width)


def test_what_max_tokens_cuts_off_is_in_the_bucket_of_max_tokens():
    wrong = BucketClassifier(upper_bounds=BOUNDS, confusion=((1, 0, 0), (0, 1, 0), (1, 0, 0)))
    assert wrong.predict(request(), 350) == 100
    assert wrong.predict(request(max_tokens=150), 350) == 150  # in bucket 1: 200, cut


@given(
    rows=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), min_size=4, max_size=4),
    request_id=st.integers(0, 10**6),
    bucket=st.integers(0, 3),
)
def test_a_bucket_without_share_is_never_drawn(rows, request_id, bucket):
    confusion = tuple(tuple(count / sum(row) for count in row) for row in rows)
    bounds = (10, 20, 30, 40)
    predictor = BucketClassifier(upper_bounds=bounds, confusion=confusion)
    predicted = predictor.predict(request(request_id), bounds[bucket])
    assert rows[bucket][bounds.index(predicted)] > 0


def test_a_row_that_rounding_left_below_1_still_names_a_bucket_for_every_draw(monkeypatch):
    monkeypatch.setattr("policies.prediction.oracles.uniform", lambda *name: 1 - 2**-53)
    row = (0.3333331, 0.6666661, 0.0)
    predictor = BucketClassifier(upper_bounds=BOUNDS, confusion=(row,) * 3)
    assert predictor.predict(request(), 50) == 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"upper_bounds": (512,)}, "upper_bounds=[512]: must be at least two"),
        ({"upper_bounds": ()}, "upper_bounds=[]: must be at least two"),
        ({"upper_bounds": (0, 5)}, "upper_bounds=[0, 5]: must be >= 1 token, found 0"),
        ({"upper_bounds": (5, 9, 9)}, "upper_bounds=[5, 9, 9]: must ascend, but 9 follows 9"),
        ({"accuracy": 1.5}, "accuracy=1.5: must be a share, >= 0 and <= 1"),
        ({"accuracy": float("nan")}, "accuracy=nan: must be a share"),
        ({"accuracy": 0.9, "confusion": CONFUSION}, "accuracy=0.9: must be null if confusion is given"),
        ({"confusion": CONFUSION[:2]}, "one row per bucket of upper_bounds (3), found 2"),
        (
            {"confusion": (*CONFUSION[:2], (0.5, 0.5))},
            "confusion[2]=[0.5, 0.5]: must have one column per bucket of upper_bounds (3), found 2",
        ),
        (
            {"confusion": ((1, 0, 0), (8, 90, 2), (0, 0, 1))},
            "confusion[1]=[8, 90, 2]: must sum to 1, found 100; divide each row of a table of counts",
        ),
        ({"confusion": ((1, 0, 0), (1.5, -0.5, 0), (0, 0, 1))}, "must be shares, >= 0, found -0.5"),
        ({"confusion": ((1, 0, 0), (0, float("nan"), 1), (0, 0, 1))}, "must be shares, >= 0, found nan"),
    ],
)
def test_rejects_matrices_and_bounds_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BucketClassifier(**{"upper_bounds": BOUNDS, **settings})
