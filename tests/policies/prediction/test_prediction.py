"""Length predictors of all kinds, and the configs that name them."""

from copy import deepcopy
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from scipy import stats

from experiments.app.settings.config_groups import CONFIG_DIR
from policies.prediction import LengthPredictor, uniform
from policies.prediction.histogram import RunningHistogram
from policies.prediction.oracles import BucketClassifier, OracleWithNoise
from policies.prediction.regression import PromptLengthRegression
from policies.user_code import name_of
from sim.settings.build import build, build_as
from tests.policies.prediction.asked import NUM_DRAWS, STAND_INS, draws, ids, lengths, request, teach

LEARNERS = [RunningHistogram(window=20, min_observations=2), PromptLengthRegression(min_observations=3)]
answers = st.lists(st.tuples(lengths, lengths, st.sampled_from("abc")), max_size=60)  # prompt, output, tenant


def fresh(predictor):
    return deepcopy(predictor)


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
