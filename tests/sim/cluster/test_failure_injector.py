"""Stragglers, lost links, overlapping crashes: times worked out by hand, in ticks of one iteration."""

import pytest

from policies.batching.chunked import Chunked
from policies.routing.load_balancing import LeastOutstanding
from sim.cluster.failures import Failures, Random, Scripted
from sim.records.run import FailureKind

TICK_S = 0.125


def scripted(kind, at, duration, *replicas, factor=None):
    return Scripted(
        kind=kind, at_s=at * TICK_S, duration_s=duration * TICK_S, replicas=replicas, factor=factor
    )


@pytest.fixture(params=[True, False], ids=["leap", "step"])
def run_world(request, make_world):
    """Returns a function for the records of a world with these failures, leaping or stepping."""

    def run_world(*asks, events, **settings):
        world = make_world(*asks, failures=Failures(events=tuple(events)), **settings)
        return world.simulate(request.param).records

    return run_world


def test_a_straggler_is_slow_from_the_next_iteration_on_and_as_long_as_it_is_said_to_be(run_world, ask):
    """From 3.5 to 9.5: the iterations that begin at 4 and 7 take 3 ticks, that at 10 takes one."""
    slow = scripted(FailureKind.straggler, 3.5, 6, factor=3.0)
    iterations = run_world(ask(0.0, 4, 10), events=[slow]).iterations
    assert (iterations.duration_s / TICK_S).tolist() == [1, 1, 1, 1, 3, 3, 1, 1, 1, 1]


def test_stragglers_on_one_replica_multiply(run_world, ask):
    events = [scripted(FailureKind.straggler, at, 4, factor=2.0) for at in (0, 2)]
    iterations = run_world(ask(0.0, 4, 5), events=events).iterations
    assert (iterations.duration_s / TICK_S).tolist() == [2, 4, 1, 1, 1]


def test_a_lost_link_keeps_new_requests_away_and_lets_old_ones_finish(run_world, ask):
    """Replica 0 is out of reach from 0.5 to 20.5; its answer comes all the same."""
    requests = run_world(
        *(ask(tick * TICK_S, 4, 10) for tick in (0, 1, 2, 3, 21)),
        num_replicas=2,
        routing=LeastOutstanding(),
        events=[scripted(FailureKind.link_down, 0.5, 20, 0)],
    ).requests
    assert requests.replica.tolist() == [0, 1, 1, 1, 0]
    assert requests.finished_s[0] == 10 * TICK_S
    assert (requests.attempts == 1).all()


def test_a_replica_is_down_while_any_crash_lasts(run_world, ask):
    """From 1 to 5 and from 3 to 9: it serves from 9 on."""
    crashes = [scripted(FailureKind.crash, 1, 4, 0), scripted(FailureKind.host_out_of_memory, 3, 6, 0)]
    requests = run_world(
        *(ask((tick + 0.5) * TICK_S, 4, 1) for tick in range(11)),
        num_replicas=2,
        routing=LeastOutstanding(),
        events=[*crashes, scripted(FailureKind.straggler, 2, 4, 0, factor=2.0)],
    ).requests
    assert requests.replica.tolist() == [0, *[1] * 8, 0, 0]


def test_a_crash_loses_a_link_that_comes_back_with_the_replica_only(run_world, ask):
    """Down from 1 to 5, out of reach from 3 to 7."""
    events = [scripted(FailureKind.crash, 1, 4, 0), scripted(FailureKind.link_down, 3, 4, 0)]
    requests = run_world(
        *(ask((tick + 0.5) * TICK_S, 4, 1) for tick in range(9)),
        num_replicas=2,
        routing=LeastOutstanding(),
        events=events,
    ).requests
    assert requests.replica.tolist() == [0, *[1] * 6, 0, 0]


def test_a_crash_at_random_ends_with_the_run(run_world, ask):
    """Otherwise the run would never end."""
    event = Random(kind=FailureKind.crash, mtbf_s=0.5 * TICK_S, mttr_s=0.5 * TICK_S)
    records = run_world(ask(0.0, 4, 10), events=[event], num_replicas=2, max_resends=3)
    assert records.requests.status.tolist() == ["rejected"]
    assert records.end_s == records.requests.finished_s[0]


def test_what_a_crash_has_lost_is_computed_again(run_world, ask):
    """Two chunks of 8 of the long prompt were done at tick 2.5."""
    records = run_world(
        ask(0.0, 40, 2),
        batching=Chunked(max_num_batched_tokens=8),
        events=[scripted(FailureKind.crash, 2.5, 1, 0)],
        num_replicas=2,
        max_resends=1,
    )
    assert records.iterations.prefill_tokens.sum() == 16 + 40
    assert records.requests.first_token_s[0] == 7.5 * TICK_S
    assert records.requests.prefill_iterations[0] == 5
    assert records.requests.lost_tokens[0] == 0
