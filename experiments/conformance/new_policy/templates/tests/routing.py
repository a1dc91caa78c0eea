"""Tests that my_policy keeps its promises, and choices that were worked out by hand."""

import pytest

from experiments.conformance.claims import Claim, claims_of
from experiments.conformance.new_policy.templates.routing import MyPolicy
from experiments.conformance.worlds import Ask, World


@pytest.mark.parametrize("claim", claims_of(MyPolicy()), ids=str)
def test_my_policy_keeps_its_promises(claim: Claim) -> None:
    claim.check(num_worlds=20)  # `pytest --policy` checks 100


def test_requests_without_a_session_go_to_the_least_loaded_replica() -> None:
    """Three requests arrive at once and go to replicas 0, 1 and 0.

    At 0.5 s, after 4 iterations of 0.125 s, request 1 has ended. Replica 1 is idle and replica 0 still has
    two requests, so request 3 goes to replica 1.
    """
    world = World(
        asks=(Ask(0.0, 4, 9), Ask(0.0, 4, 2), Ask(0.0, 4, 9), Ask(0.5, 4, 1)),
        routing=MyPolicy(),
        num_replicas=2,
    )
    assert world.simulate().records.requests["replica"].tolist() == [0, 1, 0, 1]
