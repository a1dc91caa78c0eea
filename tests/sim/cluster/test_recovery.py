"""Requests whose replica crashes: KV that is kept, read back and recomputed, by hand."""

import pytest

from experiments.conformance.toys import TICK_S
from policies.batching.chunked import Chunked
from policies.caching.prefix import PrefixCaching
from policies.core.request import Branching
from policies.scaling.scheduled import Scheduled
from sim.cluster.clients import Retries
from sim.cluster.failures import Failures, Recovery, Scripted
from sim.engine.replica_pool import Links
from sim.metrics.fleet import failure_use
from sim.metrics.output import check_conservation
from sim.records.run import FailureKind
from sim.transfer.kv_transfers import KvTransferSettings
from tests.worlds.clusters import WorldPool, toy_network
from tests.worlds.services import Service

TOKENS = Recovery(way="tokens")
KV = Recovery(way="kv", every_tokens=2)


class ToOther:
    """Sends the first request to the first replica, all others to the last."""

    is_first = True

    def choose(self, request, replicas, now):
        is_first, self.is_first = self.is_first, False
        return 0 if is_first else len(replicas) - 1


THREE = {"num_replicas": 3, "routing": ToOther()}


def crashes(*events):
    """Returns crashes, each given as (tick, replica, duration in ticks)."""
    return Failures(
        events=tuple(
            Scripted(kind=FailureKind.crash, at_s=at * TICK_S, duration_s=lasts * TICK_S, replicas=(replica,))
            for at, replica, lasts in events
        )
    )


def byte_links(**ways):
    """Returns a maker of links on which the KV of a token takes one byte."""
    return lambda: Links(bytes_per_token=1.0, **ways)


@pytest.fixture(params=[True, False], ids=["leap", "step"])
def run_world(request, make_world):
    """Returns a function for the records of a world, leaping or stepping, with links of 4 tokens per tick."""

    def run_world(*asks, **given):
        usual = {"links": byte_links(), "network": toy_network(4), "max_resends": 1}
        records = make_world(*asks, **(usual | given)).simulate(leap=request.param).records
        check_conservation(records)
        return records

    return run_world


def gaps(records):
    pairs = zip(records.gap_s / TICK_S, records.gap_count, strict=True)
    return sorted(gap for gap, count in pairs for _ in range(count))


def test_from_scratch_the_client_waits_for_everything_again(run_world, ask):
    """4 prompt tokens, 3 out by 3.5: 6 have their KV. In replica 1 the prompt again until 4.5."""
    records = run_world(ask(0.0, 4, 10), num_replicas=2, failures=crashes((3.5, 0, 10)))
    (row,) = records.requests.itertuples()
    assert (row.first_token_s, row.finished_s) == (4.5 * TICK_S, 13.5 * TICK_S)
    assert (row.lost_tokens, row.output_tokens) == (3, 10)
    assert records.recovery == (0, 6, 0, 0, 0)
    assert gaps(records) == [1] * 11


def test_with_its_tokens_a_request_goes_on_where_it_was(run_world, ask):
    """Replica 1 computes 4 + 3 tokens from 3.5 on: the fourth is out at 4.5, the tenth at 10.5."""
    records = run_world(ask(0.0, 4, 10), num_replicas=2, failures=crashes((3.5, 0, 10)), recovery=TOKENS)
    (row,) = records.requests.itertuples()
    assert (row.first_token_s, row.finished_s) == (TICK_S, 10.5 * TICK_S)
    assert (row.lost_tokens, row.output_tokens, row.attempts, row.replica) == (0, 10, 2, 1)
    assert gaps(records) == [1] * 8 + [1.5]
    assert records.iterations.prefill_tokens.tolist() == [4, 0, 0, 7, *[0] * 6]
    assert records.iterations.sampled_seqs.sum() == 10
    assert records.recovery == (1, 6, 0, 0, 0)


def test_what_the_cache_of_the_other_replica_has_is_not_computed_again(run_world, ask):
    """Replica 1 has answered the same prompt, a block of 4: of 6 lost tokens 2 are computed again."""
    text = ((7, 4),)
    records = run_world(
        ask(0.0, 4, 10, contents=text),
        ask(0.0, 5, 1, contents=text),
        num_replicas=2,
        routing=ToOther(),
        failures=crashes((3.5, 0, 10)),
        recovery=TOKENS,
        caching=PrefixCaching(block_size=4),
    )
    assert records.requests.replica.tolist() == [1, 1]
    assert records.recovery.num_recomputed_tokens == 2


def test_replicated_kv_is_read_back_and_the_rest_computed_again(run_world, ask):
    """After 2 iterations, at tick 2, 5 tokens have their KV: with the host of replica 1 at 3.25.

    Replica 2 has them at 3.5 + 1.25, and computes the other 2 of 7 by 5.75: the fourth token of the answer.
    The tenth is out at 11.75. It sends on what it has after its iterations 2, 4 and 6, at 6.75, 8.75 and
    10.75: 8 tokens, 2 and 2, to replica 1 again, the next that is up.
    """
    records = run_world(ask(0.0, 4, 10), **THREE, failures=crashes((3.5, 0, 100)), recovery=KV)
    row = records.requests.iloc[0]
    assert (row.replica, row.first_token_s, row.finished_s) == (2, TICK_S, 11.75 * TICK_S)
    assert (row.lost_tokens, row.wait_load_s) == (0, 1.25 * TICK_S)
    assert gaps(records) == [1] * 8 + [2.75]
    assert records.recovery[:2] == (1, 1)
    assert records.recovery[3:] == (5, 5)
    carried = {link.name.replace(", infiniband", ""): link.carried_bytes for link in records.links}
    assert carried["replica 0 out"] == 5
    assert carried["replica 1 in"] == records.recovery.replicated_bytes == 5 + 8 + 2 + 2
    assert carried["replica 1 out"] == carried["replica 2 in"] == 5


def test_a_replica_with_a_copy_that_is_chosen_reads_its_own_host(run_world, ask):
    """5 tokens at 4 a tick over its PCIe: at 4.75, and the fourth token at 5.75."""
    records = run_world(
        ask(0.0, 4, 10),
        num_replicas=2,
        failures=crashes((3.5, 0, 100)),
        recovery=KV,
        links=byte_links(host_bytes_per_s=4 / TICK_S),
        network=toy_network(100),
    )
    assert records.requests.finished_s.tolist() == [11.75 * TICK_S]
    assert {link.name: link.carried_bytes for link in records.links}["replica 1 host in"] == 5
    assert "replica 1 host out" not in [link.name for link in records.links]
    assert records.recovery.num_restored_tokens == 5


@pytest.mark.parametrize("max_tokens", [3, None])
@pytest.mark.parametrize(("every_tokens", "num_copied"), [(1, 5), (2, 5), (3, 0)])
def test_a_complete_request_is_not_replicated(run_world, ask, max_tokens, every_tokens, num_copied):
    """The last of 3 tokens is out after iteration 3. Its engine holds the request for another one.

    At its limit of 3 tokens it computes nothing there, else a token that is discarded.
    """
    records = run_world(
        ask(0.0, 4, 3, max_tokens=max_tokens),
        num_replicas=2,
        plans_ahead=True,
        recovery=Recovery(way="kv", every_tokens=every_tokens),
        network=toy_network(1000),
    )
    assert records.num_discarded_tokens == (max_tokens is None)
    assert records.recovery.replicated_bytes == num_copied


@pytest.mark.parametrize("max_tokens", [30, None])
def test_a_replica_that_left_with_its_last_request_replicates_nothing(run_world, ask, max_tokens):
    """Replica 1 drains from tick 2 and leaves at 30, with a step that was planned before its request ended.

    4 + 28 tokens of that request were replicated before, and 4 + 6 of the one in replica 0.
    """
    scaling = Scheduled(
        interval_s=TICK_S,
        entries=({"at": "00:00", "replicas": 2}, {"at": "01:00", "replicas": 1}),
        day_s=24 * 2 * TICK_S,
        max_replicas=2,
    )
    records = run_world(
        ask(0.0, 4, 8),
        ask(0.0, 4, 30, max_tokens=max_tokens),
        pools=(WorldPool(replicas=2, scaling=scaling),),
        num_replicas=2,
        plans_ahead=True,
        recovery=Recovery(way="kv", every_tokens=1),
        network=toy_network(1000),
    )
    assert records.requests.replica.tolist() == [0, 1]
    assert (records.replicas[1].drain_s, records.replicas[1].end_s) == (2 * TICK_S, 30 * TICK_S)
    assert records.recovery.replicated_bytes == 4 + 28 + 4 + 6


def test_what_was_on_its_way_to_the_copy_is_lost(run_world, ask):
    """It would have been there at 3.25: as with tokens only."""
    records = run_world(ask(0.0, 4, 10), num_replicas=2, failures=crashes((3.1, 0, 100)), recovery=KV)
    assert records.requests.finished_s[0] / TICK_S == pytest.approx(10.1)
    assert records.recovery.num_restored_tokens == 0
    assert records.recovery.num_recomputed_tokens == 6


def test_a_copy_that_is_lost_first_is_no_help(run_world, ask):
    """Replica 1, with the KV, at 3.4. Replica 2 computes all 7 tokens by 4.5."""
    records = run_world(
        ask(0.0, 4, 10),
        **THREE,
        failures=crashes((3.4, 1, 100), (3.5, 0, 100)),
        recovery=KV,
    )
    assert records.requests.finished_s[0] == 10.5 * TICK_S
    assert records.recovery.num_restored_tokens == 0


def test_a_copy_that_is_lost_while_it_is_read_costs_the_time_until_then_and_no_resend(run_world, ask):
    """From 3.5 to 4.5; then all 7 tokens are computed, by 5.5."""
    records = run_world(
        ask(0.0, 4, 10),
        **THREE,
        failures=crashes((3.5, 0, 100), (4.5, 1, 100)),
        recovery=KV,
    )
    row = records.requests.iloc[0]
    assert (row.status, row.finished_s, row.attempts) == ("finished", 11.5 * TICK_S, 3)
    assert records.num_resends == 1
    assert records.recovery.num_restored_tokens == 0


def test_a_copy_out_of_reach_is_not_read(run_world, ask):
    down = Scripted(kind=FailureKind.link_down, at_s=3.4 * TICK_S, duration_s=100.0, replicas=(1,))
    failures = Failures(events=(down, *crashes((3.5, 0, 100)).events))
    records = run_world(ask(0.0, 4, 10), **THREE, failures=failures, recovery=KV)
    assert records.requests.finished_s[0] == 10.5 * TICK_S


def test_a_long_prompt_that_was_half_done_goes_on_from_its_copy(run_world, ask):
    """Chunks of 8 of 40 tokens: 16 after 2 iterations, replicated at once; 24 left: 3 more, from 3.5 on."""
    records = run_world(
        ask(0.0, 40, 2),
        num_replicas=2,
        batching=Chunked(max_num_batched_tokens=8),
        failures=crashes((3.5, 0, 100)),
        recovery=KV,
        network=toy_network(1000),
    )
    assert records.requests.first_token_s[0] == 6.5 * TICK_S
    assert records.recovery[:2] == (1, 8)


def test_a_request_that_cannot_go_on_in_a_smaller_replica_begins_there(run_world, ask):
    """Known at 6.5: 10 tokens, replica 1 has room for 8, and ends the answer after 5."""
    pools = (WorldPool(), WorldPool(num_blocks=2))
    records = run_world(
        ask(0.0, 4, 10), pools=pools, num_replicas=2, failures=crashes((6.5, 0, 100)), recovery=TOKENS
    )
    (row,) = records.requests.itertuples()
    assert (row.status, row.reason, row.output_tokens, row.lost_tokens) == ("finished", "length", 5, 6)
    assert records.recovery.num_resumed == 0


def test_several_answers_begin_again(run_world, ask):
    records = run_world(
        ask(0.0, 4, 10, branching=Branching(2)),
        num_replicas=2,
        failures=crashes((3.5, 0, 100)),
        recovery=KV,
    )
    (row,) = records.requests.itertuples()
    assert (row.output_tokens, row.lost_tokens, row.finished_s) == (20, 6, 13.5 * TICK_S)


def test_a_long_prompt_of_several_answers_is_not_replicated(run_world, ask):
    """Five chunks of 8 of 40 tokens, with copies due within them."""
    records = run_world(
        ask(0.0, 40, 4, branching=Branching(2)),
        num_replicas=2,
        batching=Chunked(max_num_batched_tokens=8),
        recovery=KV,
    )
    assert records.requests.output_tokens.tolist() == [8]
    assert records.recovery.replicated_bytes == 0


def test_tokens_of_a_request_that_no_replica_continues_are_lost(run_world, ask):
    """The second crash comes when all resends are used; the client begins again, from scratch, at 6.5."""
    records = run_world(
        ask(0.0, 4, 10),
        **THREE,
        failures=crashes((3.5, 0, 100), (5.5, 2, 100)),
        recovery=TOKENS,
        retries=Retries(max_attempts=2, base_s=TICK_S, jitter="none"),
    )
    (row,) = records.requests.itertuples()
    assert (row.status, row.first_token_s, row.finished_s) == ("finished", 7.5 * TICK_S, 16.5 * TICK_S)
    assert (row.lost_tokens, row.tries, row.output_tokens) == (3 + 2, 2, 10)
    assert records.num_crash_tokens == 5


def test_without_another_replica_tokens_are_lost(run_world, ask):
    records = run_world(ask(0.0, 4, 10), failures=crashes((3.5, 0, 10)), recovery=TOKENS)
    (row,) = records.requests.itertuples()
    assert (row.status, row.reason) == ("rejected", "no replica takes requests")
    assert (row.lost_tokens, row.output_tokens) == (3, 0)


@pytest.mark.parametrize(("first_token_at", "fourth"), [("prefill", 6.5), ("decode", 9.25)])
def test_a_decode_replica_that_crashes_sends_the_request_back_to_the_prompts(
    ask, same_records, first_token_at, fourth
):
    """8 prompt tokens by tick 1, copied by 3; 3 tokens are out at 5.5. 11 tokens are computed by 6.5 and
    copied by 9.25: the fifth is out at 10.25.
    """
    late = first_token_at == "decode"
    service = Service(
        asks=(ask(0.0, 8, 6),),
        num_decode=2,
        kv_transfer=KvTransferSettings(transfer="at_end", first_token_at=first_token_at),
        failures=crashes((5.5, 1, 100)),
        recovery=TOKENS,
    )
    leapt, stepped = service.simulate(leap=True).records, service.simulate(leap=False).records
    same_records(leapt, stepped)
    check_conservation(leapt)
    (row,) = leapt.requests.itertuples()
    assert (row.first_token_s, row.last_token_s) == ((3 if late else 1) * TICK_S, 11.25 * TICK_S)
    assert (row.replica, row.lost_tokens, row.output_tokens) == (2, 0, 6)
    third = 5
    assert gaps(leapt) == sorted([fourth - third, 10.25 - fourth, 1.0, 1.0] + ([1.0] if late else [3.0]))


def test_a_token_that_was_to_go_out_with_the_kv_is_lost_with_it(ask):
    """Computed by tick 1, on its way when the prefill replica crashes at 2: the mixed one makes all three."""
    service = Service(
        asks=(ask(0.0, 8, 3),),
        num_mixed=1,
        kv_transfer=KvTransferSettings(transfer="at_end", first_token_at="decode"),
        failures=crashes((2, 0, 100)),
        recovery=TOKENS,
    )
    (row,) = service.simulate().records.requests.itertuples()
    assert (row.first_token_s, row.finished_s) == (3 * TICK_S, 5 * TICK_S)
    assert (row.replica, row.output_tokens, row.lost_tokens) == (2, 3, 0)


def test_the_summary_reports_what_was_restored_and_computed_again(run_world, ask):
    reported = failure_use(run_world(ask(0.0, 4, 10), **THREE, failures=crashes((3.5, 0, 100)), recovery=KV))
    names = ("resumed", "recomputed_tokens", "restored_tokens", "restored_bytes", "mirrored_bytes")
    assert [reported[name] for name in names] == [1, 1, 5, 5.0, 17.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"way": "prayer"}, "way=prayer: must be one of scratch, tokens, kv"),
        ({"way": "kv"}, "every_tokens=None: must be >= 1 with way=kv"),
        ({"way": "kv", "every_tokens": 0}, "every_tokens=0: must be >= 1 with way=kv"),
        ({"way": "tokens", "every_tokens": 4}, "every_tokens=4: must be null, as way=tokens copies no"),
    ],
)
def test_refuses_bad_settings(given, message):
    with pytest.raises(ValueError, match=message):
        Recovery(**given)
