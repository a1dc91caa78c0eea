"""Fleets that change, clients that try again, failures: nothing is lost, and leaping changes nothing."""

import io
from collections import Counter
from dataclasses import fields, is_dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.conformance.same_run import assert_leap_equals_step
from policies.admission.queue_bound import Outstanding
from sim.cluster.failures import Failures, Scripted
from sim.cluster.fleet import State
from sim.cluster.gateway import GatewayAttachment
from sim.metrics.output import check_conservation
from sim.records.run import FailureKind
from tests.examples import examples
from tests.worlds.clusters import draw_clusters

NEVER_S = 1e6  # long after every world has ended


@pytest.fixture(scope="module")
def clusters():
    return draw_clusters()


@given(data=st.data())
def test_leap_equals_step(data, clusters):
    assert_leap_equals_step(data.draw(clusters))


def assert_nothing_is_lost(world):
    run = world.simulate()
    records, requests = run.records, run.records.requests
    counts = check_conservation(records)
    assert len(run.source.ends) == counts["arrived"] - counts["unfinished"]
    assert len({request_id for request_id, _, _ in run.source.ends}) == len(run.source.ends)
    produced = requests.output_tokens.sum() + requests.lost_tokens.sum()
    assert records.iterations.sampled_seqs.sum() == produced + records.num_discarded_tokens
    if world.until_s is None:
        assert requests.request_id.tolist() == list(range(len(world.asks)))
        assert counts["unfinished"] == 0
        for replica in run.fleet.replicas:
            assert (replica.core.block_pool.num_used, replica.core.num_unfinished) == (0, 0)
            left = replica.num_outstanding, replica.num_outstanding_tokens, replica.num_queued_tokens
            assert left == (0, 0, 0)
        for remembered in outstanding_of(run.admission):
            assert remembered == Outstanding()
    return run


def outstanding_of(policy):
    """Returns the counts that the policy keeps of the requests that it has admitted."""
    if not is_dataclass(policy):
        return []
    return [value for f in fields(policy) if isinstance(value := getattr(policy, f.name), Outstanding)]


@given(data=st.data())
def test_no_request_and_no_token_is_lost_or_counted_twice(data, clusters):
    assert_nothing_is_lost(data.draw(clusters))


class SentWatch(GatewayAttachment):
    """Asserts, whenever a request is sent, that its replica serves and that no request is at two places."""

    def __init__(self, fleet):
        self._fleet = fleet
        self.sent = set()

    def sends(self, attempt, replica, request):
        fleet = self._fleet
        member = fleet.members[replica.index]
        assert member.state is State.serving
        assert member.is_reached
        in_engines = {other.index: [*other.core.unfinished] for other in fleet.replicas}
        places = Counter(seq.request_id for sequences in in_engines.values() for seq in sequences)
        assert all(num == 1 for num in places.values())
        for other in fleet.replicas:
            num_pending = len(other.intake.entries())
            assert other.num_outstanding == len(in_engines[other.index]) + num_pending
        self.sent.add(request.request_id)
        return False


@given(data=st.data())
def test_requests_go_to_replicas_that_serve_and_to_one_at_a_time(data, clusters):
    watches = []

    def watch(simulation):
        watches.append(SentWatch(simulation.fleet))
        simulation.gateway.attach(watches[0])

    requests = replace(data.draw(clusters), watch=watch).simulate().records.requests
    assert set(requests.request_id[requests.replica >= 0]) <= watches[0].sent


@examples(8, 15)
@given(data=st.data())
def test_the_same_cluster_gives_the_same_bytes(data, clusters):
    world = data.draw(clusters)

    def tables():
        records = world.simulate().records
        for table in (records.requests, records.iterations, records.events):
            table.to_parquet(out := io.BytesIO())
            yield out.getvalue()

    assert list(tables()) == list(tables())


@given(data=st.data(), kind=st.sampled_from(FailureKind))
def test_a_failure_that_never_happens_changes_nothing(data, kind, clusters, same_records):
    world = data.draw(clusters)
    never = Scripted(kind=kind, at_s=NEVER_S, duration_s=1.0, factor=2.0 if kind.has_factor else None)
    more = replace(world, failures=Failures(events=(*world.failures.events, never)))
    one, other = world.simulate(), more.simulate()
    same_records(one.records, other.records)
    assert one.records.replicas == other.records.replicas
