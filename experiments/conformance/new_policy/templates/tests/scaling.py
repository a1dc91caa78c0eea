"""my_policy keeps its promises, and decides what one has worked out by hand."""

import pytest

from experiments.conformance.claims import Claim, claims_of
from experiments.conformance.days import Day
from experiments.conformance.new_policy.templates.scaling import MyPolicy


@pytest.mark.parametrize("claim", claims_of(MyPolicy()), ids=str)
def test_my_policy_keeps_its_promises(claim: Claim) -> None:
    claim.check()


def test_replicas_come_at_once_and_go_after_the_window() -> None:
    """4 outstanding a replica. At 2/s for 10 s one replica of 1/s has 1 running and 10 waiting: ceil(11 / 4).

    Nothing more comes. Of the three that are wished for two are up when the interval ends in which the first
    clears the queue, and at 30 s the wish for three is 20 s old.
    """
    scaling = MyPolicy(interval_s=10, max_outstanding=4, stabilisation_s=20)
    day = Day(scaling=scaling, rates_per_s=(2, 0, 0, 0), num_intervals=4, service_s=1, cold_start_s=0)
    assert [asked.target for asked in day.live()] == [3, 3, 1, 1]
