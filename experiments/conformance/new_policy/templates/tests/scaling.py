"""Tests that my_policy keeps its promises, and targets that were worked out by hand."""

import pytest

from experiments.conformance.claims import Claim, claims_of
from experiments.conformance.days import Day
from experiments.conformance.new_policy.templates.scaling import MyPolicy


@pytest.mark.parametrize("claim", claims_of(MyPolicy()), ids=str)
def test_my_policy_keeps_its_promises(claim: Claim) -> None:
    claim.check(num_worlds=20)  # `pytest --policy` checks 100


def test_replicas_are_added_at_once_and_removed_after_the_window() -> None:
    """Target 4 outstanding requests per replica; arrivals of 2/s for 10 s, one replica that serves 1/s.

    At 10 s, 1 request runs and 10 wait: ceil(11 / 4) = 3 replicas. No more requests arrive. At 20 s the queue
    is empty, but the target of 3 is only 10 s old. At 30 s it is 20 s old, and one replica remains.
    """
    scaling = MyPolicy(interval_s=10, max_outstanding=4, stabilisation_s=20)
    day = Day(scaling=scaling, rates_per_s=(2, 0, 0, 0), num_intervals=4, service_s=1, cold_start_s=0)
    assert [asked.target for asked in day.simulate()] == [3, 3, 1, 1]
