"""Any requests that move anywhere: none is lost or counted twice, and leaping equals stepping."""

from collections import Counter

from hypothesis import given

from experiments.conformance.same_run import assert_leap_equals_step
from sim.metrics.output import check_conservation
from sim.metrics.token_times import known_token_times
from sim.records.run import Outcome
from tests.worlds.migrating import draw_migrations


def test_any_migrations_lose_nothing():
    """Each request ends once with all its tokens at increasing times, and all blocks are free in the end."""
    outcomes: Counter[Outcome] = Counter()

    @given(draw_migrations())
    def check(world):
        run = assert_leap_equals_step(world)
        records = run.records
        check_conservation(records)
        outcomes.update(one.outcome for one in records.migrations)
        ends = [request_id for request_id, _, _ in run.source.ends]
        assert len(ends) == len(set(ends)) == (records.requests.status != "unfinished").sum()
        times = known_token_times(records.requests, records.iterations, records.own_gaps)
        if times is not None:
            gaps_s, _ = times.gaps()
            assert (gaps_s > 0).all()
        if world.until_s is not None:
            return
        for replica in run.fleet.replicas:
            replica.core.check_integrity()
            assert not replica.core.unfinished
            assert replica.core.block_pool.num_free == replica.core.block_pool.num_blocks
            counts = (replica.num_outstanding, replica.num_outstanding_tokens, replica.num_queued_tokens)
            assert counts == (0, 0, 0)

    check()
    assert outcomes[Outcome.moved]
    assert outcomes[Outcome.no_room]
    assert outcomes[Outcome.ended]
