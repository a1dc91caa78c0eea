"""The traits of policies: what they say about themselves, with or without a class of ours to inherit from."""

from dataclasses import dataclass

import pytest

from policies.admission import AdmissionTraits
from policies.batching import BatchingTraits, supports_mixed_role
from policies.routing import RoutingTraits
from policies.user_code import traits_of


class SaysNothing:
    """A user's policy without declarations."""


class OfAttributes:
    reads_signals = True
    keeps_together = "session"


@dataclass(frozen=True, slots=True)
class OfProperties:
    limit: int = 100

    @property
    def reads_replicas(self):
        return self.limit > 100

    def on_end(self, request, now):
        """Is called when a request has ended."""


class Wrapper:
    """Passes everything on to another policy."""

    def __init__(self, policy):
        self._policy = policy

    def __getattr__(self, name):
        return getattr(self._policy, name)


def test_a_policy_that_says_nothing_has_the_defaults():
    assert traits_of(SaysNothing(), RoutingTraits) == RoutingTraits()
    assert traits_of(SaysNothing(), AdmissionTraits) == AdmissionTraits()
    assert traits_of(SaysNothing(), BatchingTraits) == BatchingTraits()


def test_attributes_properties_and_methods_are_read():
    assert traits_of(OfAttributes(), RoutingTraits) == RoutingTraits(
        reads_signals=True, keeps_together="session"
    )
    policy = OfProperties()
    assert traits_of(policy, RoutingTraits) == RoutingTraits(reads_replicas=False, on_end=policy.on_end)
    assert traits_of(OfProperties(limit=101), RoutingTraits).reads_replicas


def test_what_a_wrapper_passes_on_is_read():
    assert traits_of(Wrapper(OfAttributes()), RoutingTraits).reads_signals


def test_what_the_family_does_not_know_is_left_out():
    assert traits_of(OfAttributes(), AdmissionTraits) == AdmissionTraits(reads_signals=True)


@pytest.mark.parametrize("name", ["supports_mixed_role", "serves_alone"])
def test_the_old_name_of_a_role_is_read(name):
    assert not supports_mixed_role(type("OneRole", (), {name: False})())
    assert supports_mixed_role(SaysNothing())
