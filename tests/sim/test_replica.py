"""One engine in simulated time: what it tells the router, and odd moments in a request's life."""

import pytest

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.engine import EngineCore, RejectedError
from policies.request import Prompt, Request
from policies.scheduling.fcfs import Fcfs
from sim.clock import Clock
from sim.interrupt import Interrupt
from sim.records import RequestLog
from sim.replica import Replica

TICK_S = 0.125


@pytest.fixture
def replica(toy_model):
    """A replica with two slots, an iteration a tick, its `log` of requests, `clock` and list of `ended`."""
    clock, log, ended = Clock(), RequestLog(), []
    core = EngineCore(
        batching=Chunked(),
        scheduling=Fcfs(),
        pool=Paged(block_size=4).pool(100),
        max_num_seqs=2,
        max_model_len=100,
    )
    replica = Replica(0, core, toy_model(flat=True), clock, log, lambda seq: ended.append(seq.request_id))
    replica.clock, replica.log, replica.ended = clock, log, ended
    return replica


def send(replica, request_id, num_output_tokens, num_prompt_tokens=4):
    request = Request(request_id, replica.clock.now, Prompt(num_prompt_tokens))
    replica.log.arrive(request)
    replica.submit(request, num_output_tokens)


def test_outstanding_requests_are_those_sent_and_not_ended(replica):
    for request_id, num_output_tokens in enumerate([2, 5, 3]):
        send(replica, request_id, num_output_tokens)
    counts = []
    for ticks in (0.5, 2.5, 4.5, 5.5):
        replica.clock.run_some(99, ticks * TICK_S, Interrupt())
        counts.append(replica.num_outstanding)
    assert counts == [3, 2, 2, 0]
    assert replica.ended == [0, 1, 2]


def test_a_rejected_request_is_not_outstanding(replica):
    with pytest.raises(RejectedError, match="prompt of 100 tokens: max_model_len is 100"):
        send(replica, 0, 5, num_prompt_tokens=100)
    assert replica.num_outstanding == 0


def test_a_replica_falls_idle_and_wakes_up(replica):
    send(replica, 0, 3)
    replica.clock.run_some(99, 10.0, Interrupt())
    replica.clock.at(10.0, 0, lambda event: send(replica, 1, 3))
    replica.clock.run_some(99, 20.0, Interrupt())
    assert list(replica.log.finished_s)[:2] == [3 * TICK_S, 10.0 + 3 * TICK_S]


def test_giving_up_twice_or_too_late_changes_nothing(replica):
    send(replica, 0, 9)
    replica.clock.run_some(99, 2.5 * TICK_S, Interrupt())
    replica.abort(0)
    replica.abort(0)
    replica.clock.run_some(99, 9.0, Interrupt())
    replica.abort(0)
    replica.clock.run_some(99, 10.0, Interrupt())
    assert replica.ended == [0]
    assert replica.num_outstanding == 0


def test_giving_up_before_the_first_plan_leaves_no_trace(replica):
    send(replica, 0, 9)
    replica.abort(0)
    replica.clock.run_some(99, 9.0, Interrupt())
    assert replica.ended == [0]
    assert replica.core.num_iterations == 0


def test_the_queue_moves_up_when_a_running_client_gives_up(make_world, ask):
    """One slot. The first gives up at 6 ticks; the second starts there and gives up at 2 + 6."""
    world = make_world(ask(0.0, 4, 50), ask(2.0 * TICK_S, 4, 50), max_num_seqs=1, patience_s=6 * TICK_S)
    requests = world.fly().records.requests
    assert requests.scheduled_s.tolist() == [0.0, 6 * TICK_S]
    assert requests.finished_s.tolist() == [6 * TICK_S, 8 * TICK_S]
    assert requests.output_tokens.tolist() == [6, 2]


def test_a_request_preempted_in_the_step_that_admitted_it_is_scheduled_when_it_returns(make_world, ask):
    """A policy that admits before it decodes: the newcomer takes the last block, loses it to a decode of the
    same step, and comes back when the first request has ended."""

    class AdmitThenDecode:
        def fill(self, view, step, now):
            for seq in view.waiting:
                step.admit(seq, 99)
            for seq in view.decoding:
                step.decode(seq)

    world = make_world(
        ask(0.0, 4, 3),
        ask(0.5 * TICK_S, 4, 2),
        batching=AdmitThenDecode(),
        paged=Paged(block_size=4),
        num_blocks=2,
    )
    requests = world.fly().records.requests
    assert requests.preemptions.tolist() == [0, 1]
    assert requests.scheduled_s.tolist() == [0.0, 3 * TICK_S]
    assert requests.first_token_s.tolist() == [TICK_S, 4 * TICK_S]
