"""Length predictors: the stand-ins err as configured, the learners learn the distribution."""

import re
from copy import deepcopy
from fractions import Fraction
from math import ceil, exp, log, sqrt

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from scipy import stats

from policies.core.policy_names import name_of
from policies.core.request import Prompt, Request
from policies.prediction import LengthPredictor
from policies.prediction.buckets import S3_ACCURACY, BucketClassifier
from policies.prediction.draws import uniform
from policies.prediction.histogram import RunningHistogram
from policies.prediction.oracle_with_noise import OracleWithNoise
from policies.prediction.regression import PromptLengthRegression
from sim.settings.build import build, build_as
from sim.settings.config_groups import CONFIG_DIR

NUM_DRAWS = 20_000
BOUNDS = (100, 200, 400)
CONFUSION = ((0.7, 0.2, 0.1), (0.25, 0.5, 0.25), (0.0, 0.4, 0.6))
STAND_INS = [OracleWithNoise(error=0.7), BucketClassifier(upper_bounds=BOUNDS, confusion=CONFUSION)]
LEARNERS = [RunningHistogram(window=20, min_observations=2), PromptLengthRegression(min_observations=3)]

lengths = st.integers(1, 100_000)
answers = st.lists(st.tuples(lengths, lengths, st.sampled_from("abc")), max_size=60)  # prompt, output, tenant


def request(request_id=0, num_prompt_tokens=10, max_tokens=None, tenant=""):
    return Request(request_id, 0.0, Prompt(num_prompt_tokens), max_tokens=max_tokens, tenant=tenant)


def teach(predictor, history):
    for num_prompt_tokens, num_output_tokens, tenant in history:
        predictor.observe(request(0, num_prompt_tokens, tenant=tenant), num_output_tokens)


def fresh(predictor):
    return deepcopy(predictor)


def draws(predictor, true_num_tokens, num_draws=NUM_DRAWS):
    return np.array([predictor.predict(request(i), true_num_tokens) for i in range(num_draws)])


def ids(predictor):
    return type(predictor).__name__


# All predictors


@pytest.mark.parametrize("predictor", STAND_INS + LEARNERS, ids=ids)
@given(
    history=answers,
    request_id=st.integers(0, 10**6),
    prompt=lengths,
    truth=st.integers(1, 3) | lengths,
    max_tokens=st.none() | st.integers(1, 500),
)
def test_predictions_are_lengths_that_the_request_can_have(
    predictor, history, request_id, prompt, truth, max_tokens
):
    predictor = fresh(predictor)
    teach(predictor, history)
    predicted = predictor.predict(request(request_id, prompt, max_tokens, "a"), truth)
    assert isinstance(predicted, int)
    assert predicted >= 1
    assert max_tokens is None or predicted <= max_tokens


@pytest.mark.parametrize("predictor", STAND_INS + LEARNERS, ids=ids)
@given(history=answers, prompt=lengths, truth=lengths)
def test_equal_histories_give_equal_predictions(predictor, history, prompt, truth):
    one, other = fresh(predictor), fresh(predictor)
    for each in (one, other):
        teach(each, history)
    one.predict(request(1), truth)  # asking changes nothing
    asked = request(2, prompt, tenant="b")
    assert one.predict(asked, truth) == other.predict(asked, truth)
    assert one == other


@pytest.mark.parametrize("predictor", STAND_INS, ids=ids)
def test_the_errors_of_stand_ins_do_not_depend_on_the_order_of_asking(predictor):
    forward = [predictor.predict(request(i), 150) for i in range(200)]
    backward = [predictor.predict(request(i), 150) for i in reversed(range(200))]
    assert forward == backward[::-1]
    assert len(set(forward)) > 1


@pytest.mark.parametrize("kind", [OracleWithNoise, BucketClassifier])
def test_another_seed_errs_otherwise(kind):
    one, other = draws(kind(seed=1), 600, 200), draws(kind(seed=2), 600, 200)
    assert (one != other).sum() > 30


@pytest.mark.parametrize("predictor", LEARNERS, ids=ids)
def test_copies_of_learners_learn_alone(predictor):
    learned = fresh(predictor)
    teach(learned, [(100, 50, "a")] * 5)
    copy = deepcopy(learned)
    assert copy == learned
    before = learned.predict(request(0, 100, tenant="a"), None)
    teach(copy, [(100, 900, "a")] * 50)
    assert learned.predict(request(0, 100, tenant="a"), None) == before == 50
    assert copy.predict(request(0, 100, tenant="a"), None) > before
    assert copy != learned


@pytest.mark.parametrize("predictor", LEARNERS, ids=ids)
def test_learners_do_not_look_at_the_truth(predictor):
    predictor = fresh(predictor)
    teach(predictor, [(10, 20, ""), (20, 30, ""), (30, 50, ""), (40, 60, "")])
    assert not predictor.needs_truth
    assert {predictor.predict(request(), truth) for truth in (None, 1, 9999)} == {
        predictor.predict(request(), 77)
    }


@pytest.mark.parametrize("predictor", STAND_INS, ids=ids)
def test_stand_ins_refuse_to_work_without_the_true_length(predictor):
    assert predictor.needs_truth
    with pytest.raises(
        ValueError,
        match=f"prediction={name_of(predictor)}: needs the true output length.*prediction=histogram",
    ):
        predictor.predict(request(), None)


def test_draws_are_uniform_and_differ_by_every_part_of_their_name():
    one = np.array([uniform(0, "a", i) for i in range(NUM_DRAWS)])
    assert one.min() > 0
    assert one.max() < 1
    assert stats.kstest(one, "uniform").pvalue > 0.001
    for seed, stream in [(1, "a"), (0, "b")]:
        other = [uniform(seed, stream, i) for i in range(NUM_DRAWS)]
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / sqrt(NUM_DRAWS)


# The oracle


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


# The classifier


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
    monkeypatch.setattr("policies.prediction.buckets.uniform", lambda *name: 1 - 2**-53)
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


# The histogram


@given(
    seen=st.lists(lengths, min_size=1, max_size=60),
    tenths=st.integers(1, 10),
    window=st.integers(1, 30),
)
def test_the_histogram_predicts_the_quantile_of_its_window(seen, tenths, window):
    """The smallest length that at least that share of the window did not exceed."""
    predictor = RunningHistogram(quantile=tenths / 10, window=window, min_observations=1)
    teach(predictor, [(1, num_tokens, "a") for num_tokens in seen])
    last = seen[-window:]
    covering = [n for n in last if sum(m <= n for m in last) >= Fraction(tenths, 10) * len(last)]
    assert predictor.predict(request(tenant="a"), None) == min(covering)


def test_the_histograms_quantile_by_hand():
    for quantile, expected in [(0.07, 7), (0.5, 50), (0.9, 90), (0.901, 91), (1, 100)]:
        predictor = RunningHistogram(quantile=quantile)
        teach(predictor, [(1, num_tokens, "") for num_tokens in range(100, 0, -1)])
        assert predictor.predict(request(), None) == expected


def test_tenants_are_separate_and_new_ones_get_the_common_quantile():
    predictor = RunningHistogram(min_observations=3, initial_tokens=64)

    def ask(tenant):
        return predictor.predict(request(tenant=tenant), None)

    assert ask("long") == 64
    teach(predictor, [(1, 10, "short")] * 5 + [(1, 800, "long")] * 2)
    assert (ask("short"), ask("long"), ask("new")) == (10, 10, 10)
    teach(predictor, [(1, 800, "long")])
    assert (ask("short"), ask("long"), ask("new")) == (10, 800, 10)


def test_the_histogram_forgets_what_left_the_window():
    predictor = RunningHistogram(quantile=1, window=3, min_observations=1)
    teach(predictor, [(1, 500, "a"), (1, 20, "a"), (1, 30, "a")])
    assert predictor.predict(request(tenant="a"), None) == 500
    teach(predictor, [(1, 25, "a")])
    assert predictor.predict(request(tenant="a"), None) == 30
    assert predictor.predict(request(tenant="b"), None) == 30


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantile": 0.0}, "quantile=0.0: must be a share, > 0 and <= 1"),
        ({"quantile": 95}, "quantile=95: must be a share"),
        ({"quantile": float("nan")}, "quantile=nan: must be a share"),
        ({"window": 0}, "window=0: must be >= 1"),
        ({"min_observations": 0}, "min_observations=0: must be >= 1"),
        ({"initial_tokens": 0}, "initial_tokens=0: must be >= 1"),
        ({"window": 5}, "min_observations=10: must be <= window=5"),
    ],
)
def test_rejects_histograms_that_predict_nothing(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RunningHistogram(**settings)


# The regression


def test_the_regression_by_hand():
    """The docstring's numbers: (100, 50) and (400, 100), so 200 -> 50 * sqrt(2)."""
    predictor = PromptLengthRegression(min_observations=2)
    teach(predictor, [(100, 50, ""), (400, 100, "")])
    assert predictor.predict(request(0, 200), None) == 71
    assert predictor.predict(request(0, 100), None) == 50
    assert predictor.predict(request(0, 1600), None) == 100  # the line says 200, longer than any answer seen


def test_the_regression_recovers_a_line_behind_noise():
    """output = 3 * prompt^0.7 * exp(0.4 z): the line at any prompt within 4 standard errors."""
    rng = np.random.default_rng(0)
    prompts = np.round(np.exp(rng.uniform(log(50), log(20_000), 5000))).astype(int)
    outputs = np.round(3 * prompts**0.7 * np.exp(0.4 * rng.standard_normal(5000))).astype(int)
    predictor = PromptLengthRegression()
    teach(predictor, [(int(x), int(y), "") for x, y in zip(prompts, outputs, strict=True)])
    centred = np.log(prompts) - np.log(prompts).mean()
    for prompt in (60, 1000, 15_000):
        distance = log(prompt) - np.log(prompts).mean()
        error = 4 * 0.4 * sqrt(1 / 5000 + distance**2 / (centred**2).sum())
        predicted = predictor.predict(request(0, prompt), None)
        assert log(predicted / (3 * prompt**0.7)) == pytest.approx(0, abs=error + 0.5 / predicted)


@given(history=st.lists(st.tuples(lengths, lengths), min_size=3, max_size=40), prompt=lengths)
def test_the_running_sums_give_the_least_squares_line(history, prompt):
    x, y = np.log(np.array(history, float)).T
    assume(np.ptp(x) == 0 or np.ptp(x) > 1e-3)
    expected = y.mean()
    if np.ptp(x):
        slope, offset = np.polyfit(x - x.mean(), y, 1)
        expected = np.clip(offset + slope * (log(prompt) - x.mean()), y.min(), y.max())
    predictor = PromptLengthRegression(min_observations=2)
    teach(predictor, [(*pair, "") for pair in history])
    assert predictor.predict(request(0, prompt), None) == pytest.approx(exp(expected), rel=1e-6, abs=0.51)


def test_the_regression_waits_for_its_observations():
    predictor = PromptLengthRegression(min_observations=3, initial_tokens=77)
    teach(predictor, [(10, 5, ""), (10, 5, "")])
    assert predictor.predict(request(), None) == 77
    teach(predictor, [(10, 5, "")])
    assert predictor.predict(request(), None) == 5


def test_prompts_of_one_length_get_the_typical_answer():
    predictor = PromptLengthRegression(min_observations=2)
    teach(predictor, [(300, 10, ""), (300, 1000, "")])
    assert predictor.predict(request(0, 5000), None) == 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_observations": 1}, "min_observations=1: must be >= 2"),
        ({"initial_tokens": 0}, "initial_tokens=0: must be >= 1"),
    ],
)
def test_rejects_lines_through_one_point(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PromptLengthRegression(**settings)


# The config files


def from_config(name):
    config = OmegaConf.merge({"seed": 3}, {"prediction": OmegaConf.load(CONFIG_DIR / "prediction" / name)})
    return build(config.prediction, "prediction")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("oracle.yaml", OracleWithNoise(seed=3)),
        ("buckets.yaml", BucketClassifier(seed=3)),
        ("histogram.yaml", RunningHistogram()),
        ("regression.yaml", PromptLengthRegression()),
    ],
)
def test_every_config_builds_with_the_defaults_of_its_class(name, expected):
    assert from_config(name) == expected


def test_none_is_empty_and_every_other_config_has_been_built_here():
    assert not OmegaConf.load(CONFIG_DIR / "prediction" / "none.yaml")
    found = {file.stem for file in (CONFIG_DIR / "prediction").glob("*.yaml")}
    assert found == {"none", "oracle", "buckets", "histogram", "regression"}


@pytest.mark.parametrize("predictor", STAND_INS + LEARNERS, ids=ids)
def test_predictors_pass_where_a_config_asks_for_one(predictor):
    def needs_one(prediction: LengthPredictor):
        return prediction

    node = {"_target_": f"{type(predictor).__module__}.{type(predictor).__name__}"}
    assert type(build_as(needs_one, {"prediction": node}, "")) is type(predictor)
