"""Acceptance that differs between requests: beta and by_class."""

import re

import numpy as np
import pytest
from scipy import stats

from sim.speculation.acceptance.beta import Beta
from sim.speculation.acceptance.by_class import ByClass
from sim.speculation.acceptance.iid import Iid
from tests.sim.speculation.drafts import chain, passes, request


@pytest.mark.parametrize(("mean", "concentration"), [(0.7, 4.0), (0.9, 20.0), (0.5, 1.0)])
def test_rates_of_requests_have_the_moments_of_the_beta_distribution(mean, concentration):
    model = Beta(mean=mean, concentration=concentration)
    rates = np.array([model.rate_of(request(number), 3) for number in range(4000)])
    variance = mean * (1 - mean) / (concentration + 1)
    assert rates.mean() == pytest.approx(mean, abs=4 * np.sqrt(variance / len(rates)))
    assert rates.var() == pytest.approx(variance, rel=0.1)
    drawn = stats.kstest(rates, "beta", args=(mean * concentration, (1 - mean) * concentration))
    assert drawn.pvalue > 1e-3


def test_accepted_lengths_vary_between_requests_as_their_rates():
    model, num_tokens = Beta(mean=0.7, concentration=3.0), 4
    means, expected = [], []
    for number in range(300):
        accepted = passes(model.verdicts(request(number), 0, 1000, chain(num_tokens)), num_tokens)
        means.append(np.mean(accepted))
        rate = model.rate_of(request(number), 0)
        expected.append(sum(rate**place for place in range(1, num_tokens + 1)))
    assert np.corrcoef(means, expected)[0, 1] > 0.98
    assert np.mean(means) == pytest.approx(np.mean(expected), rel=0.03)
    assert np.mean(means) > sum(0.7**place for place in range(1, num_tokens + 1))  # convex in the rate


def test_a_mean_of_0_or_1_leaves_no_room_for_differences():
    assert Beta(mean=1.0, concentration=2.0).verdicts(request(), 0, 50, chain(3)).accepted.min() == 3
    assert Beta(mean=0.0, concentration=2.0).verdicts(request(), 0, 50, chain(3)).accepted.max() == 0


def test_a_request_has_the_rate_of_its_class():
    model = ByClass(by="tenant", rates={"code": 0.9, "chat": 0.5}, others=0.7)
    for tenant, rate in (("code", 0.9), ("chat", 0.5), ("", 0.7)):
        verdicts = model.verdicts(request(5, tenant=tenant), 1, 200, chain(4))
        expected = Iid(rate=rate).verdicts(request(5), 1, 200, chain(4))
        assert verdicts.accepted.tolist() == expected.accepted.tolist()


@pytest.mark.parametrize("by", ["adapter", "model", "priority"])
def test_classes_may_be_adapters_models_or_priorities(by):
    model = ByClass(by=by, rates={"2": 1.0}, others=0.0)
    value = 2 if by == "priority" else "2"
    assert model.verdicts(request(**{by: value}), 0, 50, chain(3)).accepted.min() == 3
    assert model.verdicts(request(), 0, 50, chain(3)).accepted.max() == 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Beta(mean=1.2, concentration=1.0), "mean=1.2: must be a share, >= 0 and <= 1"),
        (lambda: Beta(mean=0.5, concentration=0.0), "concentration=0.0: must be a finite number > 0"),
        (
            lambda: Beta(mean=0.5, concentration=float("inf")),
            "concentration=inf: must be a finite number > 0",
        ),
        (lambda: ByClass(by="user", rates={"a": 0.5}), "by=user: must be one of tenant, adapter, model"),
        (lambda: ByClass(rates={}), "rates={}: must give at least one tenant a rate"),
        (lambda: ByClass(rates={"a": 1.5}), "rates.a=1.5: must be a share, >= 0 and <= 1"),
        (lambda: ByClass(rates={"a": 0.5}, others=-1.0), "others=-1.0: must be a share, >= 0 and <= 1"),
    ],
)
def test_rejects_what_is_no_distribution_and_no_class(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()
