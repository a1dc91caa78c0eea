"""Random worlds of crashes and recovery: nothing is lost, counted twice or sampled again."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from experiments.conformance.same_run import assert_same_decisions
from sim.metrics.output import check_conservation
from tests.worlds.clusters import draw_crashes


@given(data=st.data())
def test_leap_equals_step_and_nothing_is_lost_or_counted_twice(data, same_records):
    assert_all_adds_up(data.draw(draw_crashes()), same_records)


def assert_all_adds_up(world, same_records):
    leapt, stepped = world.simulate(leap=True), world.simulate(leap=False)
    records, requests = leapt.records, leapt.records.requests
    same_records(records, stepped.records)
    assert_same_decisions(leapt, stepped)
    assert (records.links, records.recovery) == (stepped.records.links, stepped.records.recovery)
    check_conservation(records)
    produced = requests.output_tokens.sum() + requests.lost_tokens.sum()
    assert records.iterations.sampled_seqs.sum() == produced + records.num_discarded_tokens
    if world.num_users is None:
        by_id = sorted(world.asks, key=lambda ask: ask.arrival_s)
        for row in requests[(requests.status == "finished") & (requests.reason == "")].itertuples():
            asked = by_id[row.request_id]
            if not asked.sample_tokens:
                assert row.output_tokens == asked.num_output_tokens * row.samples
    for replica in leapt.fleet.replicas if world.until_s is None else ():
        left = replica.num_outstanding, replica.num_outstanding_tokens, replica.num_queued_tokens
        assert (*left, replica.core.block_pool.num_used) == (0, 0, 0, 0)


@given(data=st.data())
def test_a_token_that_went_out_is_never_sampled_again(data):
    """No request runs out of resends or patience: with its tokens kept, every request loses none."""
    world = data.draw(draw_crashes().filter(lambda world: world.recovery.keeps_tokens))
    alone = replace(
        world,
        retries=None,
        patience_s=None,
        max_resends=1000,
        asks=tuple(ask._replace(branching=None, sample_tokens=()) for ask in world.asks),
    )
    requests = alone.simulate().records.requests
    assert not requests.lost_tokens[requests.status != "rejected"].any()
