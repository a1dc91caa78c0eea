"""The promise of routing policies that read no replica."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from experiments.conformance.claims import BrokenPromise, claims_of
from policies.routing.adapter_aware import Dedicated
from policies.routing.load_balancing import LeastOutstanding, Random, RoundRobin, Weighted
from policies.routing.session_affinity import SessionAffinity
from tests.experiments.conformance.kept import num_kept


def claim_of(policy):
    """Returns the claim that a policy reads no replica; None: it does not claim this."""
    return next((claim for claim in claims_of(policy) if claim.name == "choices_need_no_replica"), None)


@pytest.mark.parametrize(
    "policy",
    [RoundRobin(), Random(), Weighted(), Dedicated(), SessionAffinity(max_load=float("inf"))],
    ids=lambda policy: type(policy).__name__,
)
def test_static_routing_reads_no_replica(policy):
    assert num_kept(claim_of(policy), 5) == 5


@pytest.mark.parametrize("policy", [LeastOutstanding(), SessionAffinity()])
def test_routing_by_load_does_not_claim_it(policy):
    assert claim_of(policy) is None


@dataclass(frozen=True)
class Shortest:
    """Declares what is wrong."""

    reads_replicas: ClassVar[bool] = False

    def choose(self, request, replicas, now):
        return min(range(len(replicas)), key=lambda i: replicas[i].num_outstanding)


@pytest.mark.slow
def test_a_false_declaration_breaks_the_promise():
    with pytest.raises(BrokenPromise, match="has read num_outstanding of a replica, although reads_replicas"):
        claim_of(Shortest()).check(num_worlds=20)
