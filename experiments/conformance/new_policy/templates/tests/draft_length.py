"""Tests that my_policy keeps its promises, and a decision that was worked out by hand."""

import numpy as np
import pytest

from experiments.conformance.claims import Claim, claims_of
from experiments.conformance.new_policy.templates.draft_length import MyPolicy
from policies.speculation import AcceptanceCounts, DraftView


@pytest.mark.parametrize("claim", claims_of(MyPolicy()), ids=str)
def test_my_policy_keeps_its_promises(claim: Claim) -> None:
    claim.check(num_worlds=20)  # `pytest --policy` checks 100


def test_a_sequence_drafts_one_token_more_than_were_accepted_on_average() -> None:
    """Of 3 passes nothing is known; 7 of 4 and 0 of 9 passes: 1 + 1 and 0 + 1; 40 of 4: all 5 tokens."""
    view = DraftView(5, AcceptanceCounts.zero(5), num_blocks=100)
    view.num_passes = np.array([3, 4, 9, 4])
    view.num_accepted = np.array([0, 7, 0, 40])
    assert MyPolicy(min_passes=4).num_draft_tokens(view).tolist() == [5, 2, 1, 5]
