"""Replicas that are built from one policy object share none of its memory, and leave the object as it was."""

import pytest

from policies.routing.load_balancing import RoundRobin
from policies.scheduling.mlfq import Mlfq
from policies.scheduling.virtual_token_counter import VirtualTokenCounter


@pytest.mark.parametrize("policy", [lambda: Mlfq(quantum_tokens=2, num_levels=3), VirtualTokenCounter])
def test_two_replicas_of_one_policy_object_serve_as_if_alone(policy, make_world, ask):
    """Requests take turns between two replicas; each does what one that is alone does with its own."""
    given, asks = policy(), [ask(0.125 * i, 8, 2 + 5 * (i % 6)) for i in range(16)]

    def finished_s(asks, scheduling, num_replicas):
        world = make_world(
            *asks, scheduling=scheduling, num_replicas=num_replicas, max_num_seqs=2, routing=RoundRobin()
        )
        return world.simulate().records.requests.finished_s.tolist()

    both = finished_s(asks, given, 2)
    for place in range(2):
        assert both[place::2] == finished_s(asks[place::2], policy(), 1)
    assert finished_s(asks, given, 2) == both
