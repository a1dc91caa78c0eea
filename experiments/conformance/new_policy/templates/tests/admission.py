"""my_policy keeps its promises, and decides what one has worked out by hand."""

import pytest

from experiments.conformance.claims import Claim, claims_of
from experiments.conformance.new_policy.templates.admission import MyPolicy
from experiments.conformance.toy_gateway import play
from experiments.conformance.worlds import Ask, World


@pytest.mark.parametrize("claim", claims_of(MyPolicy()), ids=str)
def test_my_policy_keeps_its_promises(claim: Claim) -> None:
    claim.check()


def test_while_two_are_outstanding_only_priority_0_is_let_in() -> None:
    """Requests 0 and 1 take two ticks of 0.125 s each, one for the prompt and one for the answer.

    At 0 s there is no room for request 2, but for request 3; at 1 s all have ended.
    """
    asks = (Ask(0.0, 4, 1, 1), Ask(0.0, 4, 1, 1), Ask(0.0, 4, 1, 1), Ask(0.0, 4, 1, 0), Ask(1.0, 4, 1, 1))
    gateway = play(World(asks=asks, admission=MyPolicy(max_outstanding=2)))
    assert [asked.refusal is None for asked in gateway.asked] == [True, True, False, True, True]
