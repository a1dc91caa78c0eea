"""Tests that my_policy keeps its promises, and a decision that was worked out by hand."""

from functools import partial

import pytest

from experiments.conformance.claims import Claim, claims_of
from experiments.conformance.new_policy.templates.adapters import MyPolicy
from experiments.conformance.worlds import Ask, World
from policies.adapters.serving import Adapter
from sim.engine.replica_pool import Links


@pytest.mark.parametrize("claim", claims_of(MyPolicy()), ids=str)
def test_my_policy_keeps_its_promises(claim: Claim) -> None:
    claim.check(num_worlds=20)  # `pytest --policy` checks 100


def test_the_smaller_adapter_makes_room() -> None:
    """Two slots; requests use the adapters large, small, third, when neither is in use, and large again.

    The smaller adapter is evicted, although large was used less recently: the last request waits for no load.
    If the adapter used last is spared, large is evicted, and the last request waits for a load of 8 bytes at
    64 bytes/s.
    """
    ranks = {"large": 8, "small": 4, "third": 2}
    asks = [(0.0, "large"), (1.0, "small"), (2.0, "third"), (3.0, "large")]

    def waited_s(num_spared: int) -> float:
        world = World(
            asks=tuple(Ask(at_s, 4, 1)._replace(adapter=name) for at_s, name in asks),
            adapters=MyPolicy(max_loras=2, num_spared=num_spared),
            served=tuple(Adapter(name=name, rank=rank) for name, rank in ranks.items()),
            links=partial(Links, bytes_per_token=1.0, host_bytes_per_s=64.0, disk_bytes_per_s=64.0),
        )
        return float(world.simulate().records.requests["wait_load_s"].iloc[-1])

    assert waited_s(num_spared=0) == 0
    assert waited_s(num_spared=1) == 8 / 64
