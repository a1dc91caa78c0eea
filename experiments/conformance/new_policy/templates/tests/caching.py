"""Tests that my_policy keeps its promises, and an admission that was worked out by hand."""

import pytest

from experiments.conformance.claims import Claim, claims_of
from experiments.conformance.new_policy.templates.caching import MyPolicy
from experiments.conformance.worlds import Ask, World


@pytest.mark.parametrize("claim", claims_of(MyPolicy()), ids=str)
def test_my_policy_keeps_its_promises(claim: Claim) -> None:
    claim.check(num_worlds=20)  # `pytest --policy` checks 100


def test_a_request_is_admitted_when_there_is_room_for_its_growth() -> None:
    """Five blocks of 4 tokens. Request 0: 8 prompt tokens, 3 output tokens, so 2 blocks at first.

    Request 1 has 4 prompt tokens and needs room for 8 more, 3 blocks in all. In the first step 3 are free, so
    it is admitted at once. With room for 12 more, 4 blocks, it waits until request 0 ends, after 3 steps.
    """

    def admitted(spare_tokens: int) -> list[list[int]]:
        world = World(
            asks=(Ask(0.0, num_prompt_tokens=8, num_output_tokens=3), Ask(0.0, 4, 1)),
            caching=MyPolicy(block_size=4, spare_tokens=spare_tokens),
            num_blocks=5,
        )
        (engine,) = world.simulate(leap=False).cores
        return [step.admitted for step in engine.decisions]

    assert admitted(spare_tokens=8) == [[0, 1], [], []]
    assert admitted(spare_tokens=12) == [[0], [], [], [1]]
