"""Live migrations by hand: stages, downtime, and ends without effect."""

import pytest

from experiments.conformance.toys import TICK_S
from policies.core.request import Branching
from policies.migration import Move
from policies.user_code import WrongDecisionError
from sim.cluster.clients import Retries
from sim.engine.replica_pool import Links
from sim.metrics.features import migration_figures
from sim.metrics.output import check_conservation
from sim.metrics.token_times import token_times
from sim.records.run import Outcome
from tests.worlds.clusters import Cluster, toy_network
from tests.worlds.migrating import Scripted


@pytest.fixture(params=[True, False], ids=["leap", "step"])
def run(request, ask):
    """Returns a function that runs requests on two replicas, with blocks of 4 tokens and 4 tokens a tick."""

    def run(asks, *script, rate=4, **given):
        policy = Scripted(tuple((at * TICK_S, move) for at, move in script), interval_s=TICK_S / 2)
        for name in ("last_stage_tokens", "max_stages"):
            if name in given:
                setattr(policy, name, given.pop(name))
        world = Cluster(
            asks=tuple(asks),
            migration=policy,
            links=lambda: Links(bytes_per_token=1.0),
            network=toy_network(rate),
            **{"num_replicas": 2} | given,
        )
        found = world.simulate(leap=request.param)
        check_conservation(found.records)
        for replica in found.fleet.replicas:
            replica.core.check_integrity()
            assert replica.core.block_pool.num_free == replica.core.block_pool.num_blocks
            assert not replica.num_outstanding
        return found.records

    return run


def ticks(records, request_id=0):
    """Returns the times of the tokens of a request, in ticks."""
    row = records.requests.request_id.tolist().index(request_id)
    times = token_times(records.requests, records.iterations, records.own_gaps)
    return (times.of(row) / TICK_S).tolist()


def test_stages_and_downtime_by_hand(run, ask):
    """A prompt of 8 decodes from tick 1 on; it is to move at 3.5.

    At the boundary 4 it has KV for 11 tokens: 8 of them, two full blocks, are sent until 6. At 6 it has 13:
    another block until 7. At 7 it has 14: the last 2 are at most 3, so it stops, and they arrive at 7.5. The
    other replica is idle and begins at once: the next token is out at 8.5.
    """
    records = run([ask(0.0, 8, 20)], (3.5, Move(0, 0, 1)))
    (one,) = records.migrations
    times = (one.began_s, one.stopped_s, one.ended_s, one.resumed_s)
    assert [time_s / TICK_S for time_s in times] == [3.5, 7, 7.5, 7.5]
    assert (one.num_stages, one.num_bytes, one.outcome) == (3, 14, Outcome.moved)
    assert ticks(records) == [*range(1, 8), *(n + 0.5 for n in range(8, 21))]
    row = records.requests.iloc[0]
    assert (row.replica, row.output_tokens, row.wait_load_s) == (1, 20, 0.5 * TICK_S)
    assert records.iterations.decode_seqs.groupby(records.iterations.replica).sum().tolist() == [6, 13]
    assert {link.name.split(",")[0]: link.carried_bytes for link in records.links}["replica 1 in"] == 14
    figures = migration_figures(records)
    assert (figures["count"], figures["bytes"], figures["stages"]) == (1, 14, 3)
    assert figures["downtime"]["mean_s"] == 0.5 * TICK_S
    assert figures["duration"]["mean_s"] == 4 * TICK_S


def test_a_busy_replica_resumes_at_its_next_boundary(run, ask):
    """The other replica has iterations from 0.25 on: it reserves 2 blocks at 4.25, sent until 6.25.

    At 7 a third full block is reserved at once, and sent until 8. At 8, of 15 tokens the last 3 are left: it
    stops, they are sent until 8.75, and the iteration that begins at 9.25 has the request.
    """
    records = run([ask(0.0, 8, 20), ask(0.25 * TICK_S, 8, 20)], (3.5, Move(0, 0, 1)))
    (one,) = records.migrations
    assert [time_s / TICK_S for time_s in (one.stopped_s, one.ended_s, one.resumed_s)] == [8, 8.75, 9.25]
    assert (one.num_stages, one.num_bytes) == (3, 15)
    assert ticks(records, 0)[7:9] == [8, 10.25]
    assert ticks(records, 1) == [n + 0.25 for n in range(1, 21)]


def test_a_short_request_moves_in_one_stage(run, ask):
    """6 tokens with KV at tick 4 are no more than may be copied in a last stage: it stands still for 1.5."""
    records = run([ask(0.0, 3, 20)], (3.5, Move(0, 0, 1)), last_stage_tokens=6)
    (one,) = records.migrations
    assert (one.num_stages, one.num_bytes) == (1, 6)
    assert ticks(records)[3:6] == [4, 6.5, 7.5]


def test_a_request_that_ends_first_stays(run, ask):
    """It has its 5 tokens at tick 5, while its first blocks are being copied until 6."""
    records = run([ask(0.0, 8, 5)], (3.5, Move(0, 0, 1)))
    (one,) = records.migrations
    assert one.outcome is Outcome.ended
    assert (one.num_bytes, one.ended_s) == (4, 5 * TICK_S)
    assert records.requests.replica.tolist() == [0]
    assert ticks(records) == [1, 2, 3, 4, 5]


def test_without_room_the_request_stays(run, ask):
    """The other replica has 6 blocks, of which its own request holds 5 at tick 4."""
    records = run([ask(0.0, 8, 12), ask(0.0, 16, 8)], (3.5, Move(0, 0, 1)), num_blocks=6)
    (one,) = records.migrations
    assert (one.outcome, one.num_bytes) == (Outcome.no_room, 0)
    assert ticks(records, 0) == list(range(1, 13))
    assert records.requests.replica.tolist() == [0, 1]


def test_without_room_for_the_last_stage_the_request_goes_on_where_it_was(run, ask):
    """Of 12 blocks, the other request has 8 at 4.25 and takes a ninth at 6.25; 3 are reserved by 7.

    The last 3 of 15 tokens need one more at 8, and none is free: the request goes on where it was.
    """
    asks = [ask(0.0, 8, 12), ask(0.25 * TICK_S, 27, 12)]
    records = run(asks, (3.5, Move(0, 0, 1)), num_blocks=12, last_stage_tokens=4)
    (one,) = records.migrations
    assert (one.outcome, one.num_bytes, one.stopped_s) == (Outcome.no_room, 12, 8 * TICK_S)
    assert records.requests.replica.tolist() == [0, 1]
    assert ticks(records, 0) == [*range(1, 13)]
    assert ticks(records, 1) == [n + 0.25 for n in range(1, 13)]


def test_a_preempted_request_stays(run, ask):
    """Two requests grow in 8 blocks; the one that was admitted last is preempted during a slow copy."""
    asks = [ask(0.0, 12, 12), ask(0.0, 1, 1), ask(0.0, 12, 12)]
    records = run(asks, (3.5, Move(2, 0, 1)), num_blocks=8, rate=1)
    (one,) = records.migrations
    assert one.outcome is Outcome.preempted
    assert records.requests.preemptions.tolist() == [0, 0, 1]
    assert (records.requests.output_tokens == [12, 1, 12]).all()


def test_a_copy_that_takes_too_many_stages_is_given_up(run, ask):
    """At half a token a tick, a stage of 8 tokens takes 16 ticks, in which 16 more are written."""
    records = run([ask(0.0, 8, 60)], (3.5, Move(0, 0, 1)), rate=0.5, max_stages=2, last_stage_tokens=1)
    (one,) = records.migrations
    assert one.outcome is Outcome.too_long
    assert ticks(records) == list(range(1, 61))


def test_preemptions_before_a_migration_still_count(run, ask):
    """Request 2 is preempted once on replica 0, then moves."""
    asks = [ask(0.0, 12, 12), ask(0.0, 1, 1), ask(0.0, 12, 20)]
    records = run(asks, (16.5, Move(2, 0, 1)), num_blocks=8)
    assert [one.outcome for one in records.migrations] == [Outcome.moved]
    assert records.requests.preemptions.tolist() == [0, 0, 1]
    assert records.requests.replica.tolist() == [0, 1, 1]


def test_an_aborted_request_frees_both_sides(run, ask):
    """Its client gives up at tick 5, while 8 tokens are being copied until 6."""
    records = run([ask(0.0, 8, 60)], (3.5, Move(0, 0, 1)), patience_s=5 * TICK_S)
    assert [one.outcome for one in records.migrations] == [Outcome.ended]
    assert records.requests.status.tolist() == ["aborted"]


def test_a_timeout_in_the_last_stage_frees_both_sides(run, ask):
    """It stands still from 7 to 11 and times out at 8; the second try is served alone."""
    retries = Retries(max_attempts=2, base_s=0.0, timeout_s=8 * TICK_S)
    records = run([ask(0.0, 8, 9)], (3.5, Move(0, 0, 1)), rate=0.5, last_stage_tokens=20, retries=retries)
    assert [one.outcome for one in records.migrations] == [Outcome.ended]
    assert records.requests.tries.tolist() == [2]


def test_it_can_move_back(run, ask):
    """Two moves: every token once, at increasing times."""
    records = run([ask(0.0, 8, 40)], (3.5, Move(0, 0, 1)), (20, Move(0, 1, 0)))
    assert [one.outcome for one in records.migrations] == [Outcome.moved] * 2
    assert records.requests.replica.tolist() == [0]
    times = ticks(records)
    assert len(times) == 40
    assert times == sorted(set(times))


@pytest.mark.parametrize(
    ("move", "rule"),
    [
        (Move(0, 0, 0), "two replicas of the same pool"),
        (Move(0, 0, 7), "two replicas of the same pool"),
        (Move(1, 0, 1), "`movable` requests of its source"),
        ("all", "sequence of `policies.migration.Move`"),
    ],
)
def test_impossible_moves_are_refused(run, ask, move, rule):
    with pytest.raises(WrongDecisionError, match=rule):
        run([ask(0.0, 8, 20), ask(0.0, 8, 20)], (3.5, move))


def test_requests_with_branches_are_not_movable(run, ask):
    with pytest.raises(WrongDecisionError, match="movable"):
        run([replace_branching(ask(0.0, 8, 20))], (3.5, Move(0, 0, 1)))


def replace_branching(one):
    """Returns the request with two samples."""
    return one._replace(branching=Branching(2, None))


def test_a_decision_sees_the_iteration_that_runs(ask):
    """At 3.5 the prompt of 8 has KV for 10 tokens, in 3 blocks; 2 of 4 prompts wait for slots."""
    seen = []

    class Looking(Scripted):
        def moves(self, replicas, now):
            if now == 3.5 * TICK_S:
                first = replicas[0]
                counts = (first.num_free_kv_tokens, first.num_running, first.num_waiting, first.num_preempted)
                waits = (first.num_waiting_tokens, first.num_first_waiting_tokens, first.smallest_priority)
                seen.append((counts, waits, [tuple(one) for one in first.movable]))
            return ()

    world = Cluster(
        asks=(ask(0.0, 8, 20, 1), ask(0.0, 9, 20, 2), ask(0.0, 5, 20, 3)),
        migration=Looking((), TICK_S / 2),
        num_blocks=100,
        max_num_seqs=1,
        pools=(),
        num_replicas=1,
    )
    for leap in (True, False):
        world.simulate(leap=leap)
    assert seen == [((400 - 12, 1, 2, 0), (12 + 8, 12, 1), [(0, 1, 10, 1)])] * 2
