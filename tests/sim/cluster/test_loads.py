"""Counts of many replicas, kept side by side, equal those that the replicas have."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.routing import COUNTS
from policies.routing.load_balancing import counts_of
from sim import simulate
from sim.cluster import fleet
from sim.metrics.output import check_conservation
from tests.examples import examples
from tests.worlds.clusters import draw_clusters


@dataclass(frozen=True)
class CheckedLeast:
    """Least outstanding, by counts that it compares with each replica's own."""

    def choose(self, request, replicas, now):
        assert isinstance(replicas, fleet.CountedReplicas)
        for name in COUNTS.values():
            counts = counts_of(replicas, name)
            assert counts.tolist() == [getattr(replica, name) for replica in replicas]
            assert not counts.flags.writeable
        with pytest.raises(ValueError, match="name=num_queued_tokens: must be one of num_outstanding, "):
            counts_of(replicas, "num_queued_tokens")
        return int(counts.argmin())


@pytest.fixture(scope="module")
def clusters():
    return draw_clusters()


@examples(10, 40)
@given(data=st.data())
def test_counts_side_by_side_are_those_of_the_replicas_whatever_becomes_of_these(data, clusters):
    with patch.object(fleet, "FEW", 0):
        records = replace(data.draw(clusters), routing=CheckedLeast()).simulate().records
    check_conservation(records)
    assert records.requests.request_id.is_unique


def test_the_replicas_of_each_model_have_their_counts_side_by_side():
    pools = ["pools=two_models", "workload=callers", "workload.of.num_requests=100"]
    models = ["++workload.models={llama-3.1-8b: 3, llama-3.1-70b: 1}", "++workload.tenants={a: 1}"]
    one_by_one = simulate(*pools, *models, "routing=least_outstanding").requests
    with patch.object(fleet, "FEW", 0):
        side_by_side = simulate(*pools, *models, routing=CheckedLeast()).requests
    assert side_by_side.replica.tolist() == one_by_one.replica.tolist()
    assert one_by_one.replica.nunique() == 3
