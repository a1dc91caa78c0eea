"""Tests that my_policy keeps its promises, and an order that was worked out by hand."""

import pytest

from experiments.conformance.claims import Claim, claims_of
from experiments.conformance.new_policy.templates.scheduling import MyPolicy
from experiments.conformance.worlds import Ask, World
from policies.batching.static import OneAtATime


@pytest.mark.parametrize("claim", claims_of(MyPolicy()), ids=str)
def test_my_policy_keeps_its_promises(claim: Claim) -> None:
    claim.check(num_worlds=20)  # `pytest --policy` checks 100


def test_a_shorter_class_goes_first_and_within_a_class_the_earlier_arrival() -> None:
    """Classes of 10 tokens, one request at a time, one tick of 0.125 s per iteration.

    Request 0 finds the engine empty. While it runs, requests 1 (12 tokens: second class), 2 (9: first class)
    and 3 (4: first class) arrive in this order. Requests 2 and 3 go before 1, and 2 before 3, although its
    prompt is longer.
    """
    world = World(
        asks=(Ask(0.0, 5, 8), Ask(0.1, 12, 1), Ask(0.2, 9, 1), Ask(0.3, 4, 1)),
        scheduling=MyPolicy(class_tokens=10),
        batching=OneAtATime(),
    )
    (engine,) = world.simulate(leap=False).cores
    assert engine.first_admitted == [0, 2, 3, 1]
