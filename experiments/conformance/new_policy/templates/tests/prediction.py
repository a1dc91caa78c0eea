"""Tests that my_policy keeps its promises, and a prediction that was worked out by hand."""

import pytest

from experiments.conformance.claims import Claim, claims_of
from experiments.conformance.new_policy.templates.prediction import MyPolicy
from policies.core.request import Prompt, Request


@pytest.mark.parametrize("claim", claims_of(MyPolicy()), ids=str)
def test_my_policy_keeps_its_promises(claim: Claim) -> None:
    claim.check(num_worlds=20)  # `pytest --policy` checks 100


def test_the_average_moves_by_its_weight_towards_each_output() -> None:
    """The average is 100 first, then 100 + 0.5 (200 - 100) = 150. Another tenant has its own average."""
    predictor = MyPolicy(weight=0.5, initial_tokens=10)
    mine, other = (Request(i, 0.0, Prompt(4), tenant=tenant) for i, tenant in enumerate("ab"))
    predictor.observe(mine, 100)
    predictor.observe(mine, 200)
    assert predictor.predict(mine, None) == 150
    assert predictor.predict(other, None) == 10
