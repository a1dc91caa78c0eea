"""my_policy keeps its promises, and decides what one has worked out by hand."""

import pytest

from experiments.conformance.claims import Claim, claims_of
from experiments.conformance.new_policy.templates.caching import MyPolicy
from experiments.conformance.worlds import Ask, World


@pytest.mark.parametrize("claim", claims_of(MyPolicy()), ids=str)
def test_my_policy_keeps_its_promises(claim: Claim) -> None:
    claim.check()


def test_the_second_is_admitted_when_there_is_room_for_it_to_grow() -> None:
    """Five blocks of 4 tokens. Request 0: 8 prompt tokens, 3 answer tokens, so 2 blocks at first.

    Request 1 has 4 prompt tokens and is to find room for 8 more, 3 blocks. In the first step 3 are left: it
    is admitted at once. With room for 12 more, 4 blocks, it waits until request 0 has ended, after 3 steps.
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
