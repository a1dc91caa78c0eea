"""Tests that my_policy keeps its promises, and a decision that was worked out by hand."""

import pytest

from experiments.conformance.claims import Claim, claims_of
from experiments.conformance.new_policy.templates.admission import MyPolicy
from experiments.conformance.toy_gateway import play
from experiments.conformance.worlds import Ask, World


@pytest.mark.parametrize("claim", claims_of(MyPolicy()), ids=str)
def test_my_policy_keeps_its_promises(claim: Claim) -> None:
    claim.check(num_worlds=20)  # `pytest --policy` checks 100


def test_while_two_requests_are_outstanding_only_priority_0_is_admitted() -> None:
    """Requests 0 and 1 take two ticks of 0.125 s each, one for the prompt and one for the output.

    At 0 s request 2 is refused and request 3, of priority 0, admitted; at 1 s all have ended.
    """
    asks = (Ask(0.0, 4, 1, 1), Ask(0.0, 4, 1, 1), Ask(0.0, 4, 1, 1), Ask(0.0, 4, 1, 0), Ask(1.0, 4, 1, 1))
    gateway = play(World(asks=asks, admission=MyPolicy(max_outstanding=2)))
    assert [asked.refusal is None for asked in gateway.asked] == [True, True, False, True, True]
