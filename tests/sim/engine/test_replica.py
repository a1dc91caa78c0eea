"""One engine in simulated time: what it reports to the router, and unusual moments of a request."""

import pytest

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.core.engine import EngineCore
from policies.core.limits import RejectedError
from policies.core.request import Prompt, Request
from policies.prediction.histogram import RunningHistogram
from policies.scheduling.fcfs import Fcfs
from sim.engine.clock import Clock, Interrupt, Phase
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool, RunContext
from sim.records.requests import RequestLog

TICK_S = 0.125


class Watched:
    """A replica, the clock that drives it, its log, and the requests that have ended."""

    def __init__(self, replica, clock, log, ended):
        self.replica, self.clock, self.log, self.ended = replica, clock, log, ended

    def __getattr__(self, name):
        return getattr(self.replica, name)


@pytest.fixture
def make_replica(toy_model):
    """Returns a maker of a replica with two slots, iterations of one tick, a log, a clock and its `ended`."""

    def make(predictor=None, **given):
        clock, log, ended = Clock(), RequestLog(), []

        def core():
            return EngineCore(
                batching=Chunked(),
                scheduling=Fcfs(),
                predictor=predictor,
                block_pool=Paged(block_size=4).pool(KvMemory(100)),
                max_num_seqs=2,
                max_model_len=100,
            )

        of_pool = {name: given.pop(name) for name in ("frontend_s", "plans_ahead") if name in given}
        context = RunContext(
            clock=clock, requests=log, on_end=lambda seq: ended.append(seq.request_id), **given
        )
        replica = Replica(0, ReplicaPool(core=core, model=toy_model(flat=True), **of_pool), context)
        return Watched(replica, clock, log, ended)

    return make


@pytest.fixture
def replica(make_replica):
    return make_replica()


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


def test_a_prediction_knows_the_outputs_that_ended_before_the_request_entered(make_replica):
    """The first ends after 3 ticks; the second comes half a tick earlier, and enters after that iteration."""
    replica = make_replica(predictor=RunningHistogram(min_observations=1, initial_tokens=50))
    send(replica, 0, 3)
    replica.clock.at(2.5 * TICK_S, Phase.arrive, lambda event: send(replica, 1, 9))
    replica.clock.run_some(99, 4.5 * TICK_S, Interrupt())
    assert replica.core.find(1).num_predicted_tokens == 3


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
    requests = world.simulate().records.requests
    assert requests.scheduled_s.tolist() == [0.0, 6 * TICK_S]
    assert requests.finished_s.tolist() == [6 * TICK_S, 8 * TICK_S]
    assert requests.output_tokens.tolist() == [6, 2]


def test_a_request_preempted_in_the_step_that_admitted_it_is_scheduled_when_it_returns(make_world, ask):
    """A policy that admits before it decodes: the newcomer takes the last block, loses it to a decode of the
    same step, and comes back when the first request has ended.
    """

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
        caching=Paged(block_size=4),
        num_blocks=2,
    )
    requests = world.simulate().records.requests
    assert requests.preemptions.tolist() == [0, 1]
    assert requests.scheduled_s.tolist() == [0.0, 3 * TICK_S]
    assert requests.first_token_s.tolist() == [TICK_S, 4 * TICK_S]


def at(replica, ticks, action):
    replica.clock.at(ticks * TICK_S, Phase.arrive, lambda event: action())


def test_requests_on_the_way_to_the_engine_are_outstanding(make_replica):
    """The engine knows of both at 2.5 ticks; they end at 4.5 and 5.5."""
    replica = make_replica(frontend_s=2.5 * TICK_S)
    send(replica, 0, 2)
    send(replica, 1, 3)
    counts = []
    for ticks in (1, 3, 5, 6):
        replica.clock.run_some(99, ticks * TICK_S, Interrupt())
        counts.append((replica.num_outstanding, replica.core.num_unfinished))
    assert counts == [(2, 0), (2, 2), (1, 1), (0, 0)]


@pytest.mark.parametrize("leap", [True, False])
@pytest.mark.parametrize(
    ("plans_ahead", "given_up_at", "ends_at"),
    [
        (False, 5.0, 7.5),  # on the way: it is let go at the first boundary after the engine met it at 6.75
        (False, 7.0, 7.5),
        (True, 5.0, 8.5),  # the engine meets it at 7.5, behind the plan up to 8.5
        (True, 7.0, 8.5),  # the server knows it, the engine does not
        (True, 8.0, 8.5),
    ],
)
def test_a_request_that_gives_up_on_the_way_is_released_when_the_engine_can(
    make_replica, leap, plans_ahead, given_up_at, ends_at
):
    """Request 0, known at 2.5 ticks, has boundaries at 3.5, 4.5, ...; 1 is sent at 4.25, so known at 6.75."""
    replica = make_replica(frontend_s=2.5 * TICK_S, plans_ahead=plans_ahead, leap=leap)
    send(replica, 0, 20)
    at(replica, 4.25, lambda: send(replica, 1, 20))
    at(replica, given_up_at, lambda: replica.abort(1))
    replica.clock.run_some(999, 99 * TICK_S, Interrupt())
    assert replica.ended == [1, 0]
    assert list(replica.log.finished_s)[:2] == [22.5 * TICK_S, ends_at * TICK_S]
    assert replica.num_outstanding == 0


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_a_request_that_gives_up_on_the_way_to_an_idle_engine_leaves_no_trace(make_replica, plans_ahead):
    replica = make_replica(frontend_s=2.5 * TICK_S, plans_ahead=plans_ahead)
    send(replica, 0, 9)
    replica.abort(0)
    replica.clock.run_some(99, 9.0, Interrupt())
    assert replica.ended == [0]
    assert list(replica.log.finished_s)[:1] == [2.5 * TICK_S]
    assert replica.core.num_iterations == 0


def test_a_request_too_long_is_rejected_before_the_frontend(make_replica):
    replica = make_replica(frontend_s=TICK_S, plans_ahead=True)
    with pytest.raises(RejectedError, match="prompt of 100 tokens: max_model_len is 100"):
        send(replica, 0, 5, num_prompt_tokens=100)
    assert replica.num_outstanding == 0
