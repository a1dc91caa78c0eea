"""Tests that my_policy keeps its promises, and a schedule that was worked out by hand."""

import pytest

from experiments.conformance.claims import Claim, claims_of
from experiments.conformance.new_policy.templates.batching import MyPolicy
from experiments.conformance.worlds import Ask, World


@pytest.mark.parametrize("claim", claims_of(MyPolicy()), ids=str)
def test_my_policy_keeps_its_promises(claim: Claim) -> None:
    claim.check(num_worlds=20)  # `pytest --policy` checks 100


def test_prompts_fill_the_budget_that_decodes_leave() -> None:
    """Budget 8. Request 0: 4 prompt tokens, 3 output tokens; request 1: 10 prompt tokens, 1 output token.

    The first iteration computes all of prompt 0 and 4 tokens of prompt 1. In the second, request 0 decodes
    one token beside the last 6 tokens of prompt 1, which yield its only output token. In the third, request 0
    decodes alone.
    """
    world = World(
        asks=(Ask(0.0, num_prompt_tokens=4, num_output_tokens=3), Ask(0.0, 10, 1)),
        batching=MyPolicy(max_num_batched_tokens=8),
    )
    (engine,) = world.simulate(leap=False).cores
    assert [step.tokens_by_request for step in engine.decisions] == [{0: 4, 1: 4}, {0: 1, 1: 6}, {0: 1}]
