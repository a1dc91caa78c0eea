"""Disaggregated replicas that crash, links that fail and clients that retry: nothing is lost or leaked."""

from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import given

from experiments.conformance.same_run import assert_leap_equals_step
from experiments.conformance.toys import TICK_S
from policies.batching.chunked import Chunked
from sim.cluster.clients import Retries
from sim.cluster.failures import Failures, Scripted
from sim.metrics.output import check_conservation
from sim.records.run import FailureKind
from sim.transfer.kv_transfers import KvTransferSettings
from tests.sim.transfer.prefill_and_decode import AT_END, run_world, ticks
from tests.worlds.services import Service, draw_failing_services


@given(service=draw_failing_services())
def test_leap_equals_step_when_replicas_crash_and_clients_try_again(service):
    check_conservation(assert_leap_equals_step(service).records)


@dataclass
class Counting:
    """Round robin that counts: the end of each chosen request is reported once, and only then."""

    turn: int = 0
    under_way: Counter = field(default_factory=Counter)

    def choose(self, request, replicas, now):
        self.turn += 1
        self.under_way[request.request_id] += 1
        assert self.under_way[request.request_id] == 1, "chosen again before its end was reported"
        return self.turn % len(replicas)

    def on_first_token(self, request, now):
        assert self.under_way[request.request_id] == 1, "its end was reported before its first token"

    def on_end(self, request, now):
        self.under_way[request.request_id] -= 1
        assert self.under_way[request.request_id] == 0, "an end was reported twice"


@given(service=draw_failing_services())
def test_the_router_gets_one_end_for_each_time_that_it_has_chosen(service):
    records = replace(service, routing=Counting()).simulate().records
    check_conservation(records)
    assert records.requests.request_id.is_unique


def test_a_retry_is_not_reported_as_ended_when_its_former_prefill_replica_lets_go(ask):
    """The decode replica has room for two. The third request times out there, while its prefill replica is
    in the middle of a chunk of the fifth, and comes again to the other one before that chunk ends.
    """
    service = Service(
        asks=[
            ask(0.0, 4, 10),
            ask(0.0, 4, 10),
            ask(0.5 * TICK_S, 4, 4),
            ask(5.0 * TICK_S, 4, 4),
            ask(5.1 * TICK_S, 40, 4),
        ],
        num_prefill=2,
        max_num_seqs=2,
        prefill_batching=Chunked(max_num_batched_tokens=4),
        kv_transfer=KvTransferSettings(transfer="at_end", first_token_at="decode"),
        retries=Retries(
            timeout_s=8.0 * TICK_S, base_s=0.05 * TICK_S, jitter="none", timeout_until="first_token"
        ),
        routing=Counting(),
    )
    requests = service.simulate().records.requests
    assert requests.tries.tolist() == [1, 1, 2, 2, 4]
    assert requests.status.tolist() == ["finished"] * 4 + ["rejected"]


def crash(at_ticks, replica, duration_ticks=100):
    return Scripted(
        kind=FailureKind.crash,
        at_s=at_ticks * TICK_S,
        duration_s=duration_ticks * TICK_S,
        replicas=(replica,),
    )


def test_a_decode_replica_that_crashes_during_the_copy_costs_only_the_copy(ask):
    """Prompt until tick 1; copy to replica 1 until it crashes at 2; again to replica 2, until 4."""
    failures = Failures(events=(crash(2, 1),))
    records = run_world(ask(0, 8, 3), num_decode=2, kv_transfer=AT_END, failures=failures)
    assert ticks(records, "first_token", "last_token") == [(1, 6)]
    (row,) = records.requests.itertuples()
    assert (row.replica, row.attempts, row.lost_tokens) == (2, 1, 0)


def test_a_prefill_replica_that_crashes_during_the_copy_costs_the_prompt(ask):
    """Prompt until tick 1; replica 0 crashes at 2, with half of the KV copied; again in replica 1 until 3."""
    failures = Failures(events=(crash(2, 0),))
    records = run_world(ask(0, 8, 3), num_prefill=2, kv_transfer=AT_END, failures=failures)
    assert ticks(records, "first_token", "last_token") == [(3, 7)]
    (row,) = records.requests.itertuples()
    assert (row.prefill_replica, row.attempts, row.lost_tokens) == (1, 2, 1)


def test_a_request_that_has_timed_out_ends_once_if_its_prefill_replica_crashes_during_the_copy(ask):
    """The second request times out at 3.6, in the middle of a step of replica 1; replica 0 crashes at 3.8."""
    records = run_world(
        ask(0, 1, 30),
        ask(1.0 * TICK_S, 8, 3),
        kv_transfer=KvTransferSettings(transfer="at_end", first_token_at="decode"),
        retries=Retries(timeout_s=2.6 * TICK_S, timeout_until="first_token", max_attempts=1),
        failures=Failures(events=(crash(3.8, 0),)),
    )
    assert records.requests.status.tolist() == ["finished", "rejected"]


def test_a_lost_link_stalls_the_copy(ask):
    """4 of 8 tokens are copied by tick 2; the link is back at 5: there at 6."""
    down = Scripted(kind=FailureKind.link_down, at_s=2 * TICK_S, duration_s=3 * TICK_S, replicas=(1,))
    records = run_world(ask(0, 8, 3), kv_transfer=AT_END, failures=Failures(events=(down,)))
    assert ticks(records, "kv_transfer", "last_token") == [(5, 8)]
