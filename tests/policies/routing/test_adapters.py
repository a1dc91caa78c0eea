"""Routers that know of LoRA adapters, called directly."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.request import Prompt, Request
from policies.routing.adapter_aware import AdapterAffinity, Dedicated


def replicas(*loads):
    """Returns replicas, each given as (outstanding requests, resident adapters)."""
    return [
        SimpleNamespace(
            index=index, num_outstanding=count, has_adapter=lambda name, there=there: name in there
        )
        for index, (count, there) in enumerate(loads)
    ]


def ask(adapter, request_id=0):
    return Request(request_id, 0.0, Prompt(4), adapter=adapter)


def test_a_request_goes_to_the_least_loaded_replica_that_has_its_adapter():
    views = replicas((0, "b"), (5, "ab"), (4, "a"), (4, "a"))
    assert AdapterAffinity().choose(ask("a"), views, 0.0) == 2


def test_too_many_there_and_another_replica_gets_it():
    views = replicas((9, "a"), (1, ""), (1, ""))
    assert AdapterAffinity(max_excess=8).choose(ask("a"), views, 0.0) == 0
    assert AdapterAffinity(max_excess=7).choose(ask("a"), views, 0.0) == 1


@pytest.mark.parametrize("adapter", [None, "unknown"])
def test_an_adapter_that_is_nowhere_goes_to_the_replica_with_the_fewest_requests(adapter):
    assert AdapterAffinity().choose(ask(adapter), replicas((3, "a"), (2, "b"), (2, "c")), 0.0) == 1


def test_a_negative_excess_is_refused():
    with pytest.raises(ValueError, match="max_excess=-1: must be >= 0 requests"):
        AdapterAffinity(max_excess=-1)


def test_an_adapter_whose_replica_has_gone_is_dealt_out_again_and_the_others_stay():
    """a, b, c on 0, 1, 2. Without 0 its adapter goes to one of the others, b and c stay where they were."""
    routing, views = Dedicated(), replicas(*[(0, "")] * 3)
    assert [routing.choose(ask(name), views, 0.0) for name in "abc"] == [0, 1, 2]
    left = views[1:]
    assert [left[routing.choose(ask(name), left, 0.0)].index for name in "abc"] == [1, 1, 2]
    assert [routing.choose(ask(name), views, 0.0) for name in "abcd"] == [1, 1, 2, 0]


@given(st.lists(st.sampled_from([None, *"abcdefg"])), st.integers(1, 4))
def test_an_adapter_has_one_replica_and_they_are_dealt_out_evenly(names, num_replicas):
    routing, views = Dedicated(), replicas(*[(0, "")] * num_replicas)
    chosen = [(name, routing.choose(ask(name), views, 0.0)) for name in names]
    owners = dict(chosen)
    assert all(owners[name] == index for name, index in chosen)
    counts = [list(owners.values()).count(index) for index in range(num_replicas)]
    assert max(counts) - min(counts) <= 1
