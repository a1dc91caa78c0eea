"""Leaping over iterations and stepping through them leave the same records and take the same decisions."""

from functools import partial
from math import inf, nextafter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.conformance.same_run import assert_leap_equals_step
from policies.batching.chunked import Chunked
from policies.batching.partial_prefills import PartialPrefills
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.core.request import Branching
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.priority import Priority
from sim.engine.replica import MAX_LEAP
from sim.engine.replica_pool import Links
from tests.examples import examples
from tests.worlds.rooflines import small_roofline

TICK_S = 0.125  # one iteration of the flat toy model


@given(data=st.data())
def test_leap_equals_step(data, worlds):
    """Times too are equal to the last bit: 1e-9 is promised, but there is no reason for any difference."""
    assert_leap_equals_step(data.draw(worlds))


@given(data=st.data())
def test_leap_equals_step_with_branches(data, branching_worlds):
    assert_leap_equals_step(data.draw(branching_worlds))


@given(data=st.data())
def test_leap_equals_step_with_adapters(data, adapter_worlds):
    assert_leap_equals_step(data.draw(adapter_worlds))


@given(data=st.data(), boundary=st.integers(0), early_or_late=st.sampled_from([-inf, None, inf]))
def test_leap_equals_step_when_requests_arrive_on_a_boundary_or_a_hair_beside_it(
    data, worlds, ask, boundary, early_or_late
):
    """A world is simulated, then again with two more requests at the very end of one of its iterations."""
    world = data.draw(worlds.filter(lambda world: world.num_users is None))
    iterations = world.simulate().records.iterations
    if len(iterations):
        row = iterations.iloc[boundary % len(iterations)]
        at_s = row.start_s + row.duration_s
        if early_or_late is not None:
            at_s = nextafter(at_s, early_or_late)
        world = add_requests(world, ask(at_s, 3, 5), ask(at_s, 2, 9))
    assert_leap_equals_step(world)


def add_requests(world, *asks):
    return type(world)(**(vars(world) | {"asks": world.asks + asks}))


@examples(8, 15)
@given(data=st.data())
def test_leap_equals_step_on_a_roofline(data, worlds, roofline):
    """Durations of a real hardware model, its arithmetic on single numbers and on arrays included."""
    world = data.draw(worlds)
    assert_leap_equals_step(type(world)(**(vars(world) | {"model": roofline})))


@pytest.fixture(scope="module")
def roofline():
    return small_roofline()


class LongestContextFirst:
    """A user's policy, written from the README alone: plain loops over the view, no promise."""

    def fill(self, view, step, now):
        step.budget(12)
        for seq in sorted(view.decoding, key=lambda seq: (-seq.num_known, seq.request_id)):
            step.decode(seq)
        for seq in view.prefilling:
            step.prefill(seq, 5)
        for seq in view.waiting:
            if not step.admit(seq, 5):
                break


@given(data=st.data())
def test_leap_equals_step_for_a_policy_that_promises_nothing(data, worlds):
    world = data.draw(worlds)
    leapt = assert_leap_equals_step(type(world)(**(vars(world) | {"batching": LongestContextFirst()})))
    assert all(decision.num_iterations == 1 for core in leapt.cores for decision in core.decisions)


def leaps(run):
    return [decision.num_iterations for decision in run.cores[0].decisions]


def test_an_undisturbed_answer_is_one_leap(make_world, ask):
    """One iteration for the prompt and the first token, then 29 more tokens at once."""
    run = assert_leap_equals_step(make_world(ask(0.0, 4, 30)))
    assert leaps(run) == [1, 29]
    assert run.records.requests.finished_s.tolist() == [30 * TICK_S]


def test_a_leap_is_priced_in_parts(make_world, ask):
    num_tokens = 2 * MAX_LEAP + 100
    run = assert_leap_equals_step(make_world(ask(0.0, 4, num_tokens)))
    assert leaps(run) == [1, MAX_LEAP, MAX_LEAP, 99]


@pytest.mark.parametrize(
    ("arrival_ticks", "seen_at_ticks"),
    [
        (4.5, 5),  # in the middle of an iteration: at its end
        (5.0, 5),  # at the very end of one: there
        (5.0 + 1e-9, 6),  # just missed
        (30.0, 30),  # at the end of the leap
        (31.5, 31.5),  # the engine is idle: at once
    ],
)
def test_an_arrival_is_seen_at_the_first_boundary_not_before_it(
    make_world, ask, arrival_ticks, seen_at_ticks
):
    world = make_world(ask(0.0, 4, 30), ask(arrival_ticks * TICK_S, 4, 2))
    requests = assert_leap_equals_step(world).records.requests
    assert requests.scheduled_s[1] == seen_at_ticks * TICK_S
    assert requests.first_token_s[1] == (seen_at_ticks + 1) * TICK_S
    assert requests.finished_s[0] == 30 * TICK_S


@pytest.mark.parametrize(
    ("arrival_ticks", "seen_at_ticks"),
    [
        (4.5, 6),  # in the middle of an iteration: behind it, and behind the one that is planned already
        (5.0, 6),  # at the very end of one: behind the next
        (5.0 + 1e-9, 7),
        (29.5, 31),  # the iteration planned already decodes a token behind the stop of the first request
        (30.0, 31),
        (31.5, 31.5),  # the engine is idle: at once
    ],
)
def test_an_engine_that_plans_ahead_sees_an_arrival_one_iteration_later(
    make_world, ask, arrival_ticks, seen_at_ticks
):
    world = make_world(ask(0.0, 4, 30), ask(arrival_ticks * TICK_S, 4, 2), plans_ahead=True)
    requests = assert_leap_equals_step(world).records.requests
    assert requests.scheduled_s.tolist() == [0.0, seen_at_ticks * TICK_S]
    assert requests.first_token_s[1] == (seen_at_ticks + 1) * TICK_S
    assert requests.finished_s[0] == 30 * TICK_S


def test_a_frontend_delays_the_first_token_and_no_other(make_world, ask):
    """It knows the request at 2.5 ticks; 4 iterations. The next, to an idle engine, waits 2.5 ticks, too."""
    world = make_world(ask(0.0, 4, 4), ask(10 * TICK_S, 4, 1), frontend_s=2.5 * TICK_S)
    requests = assert_leap_equals_step(world).records.requests
    assert requests.arrival_s.tolist() == [0.0, 10 * TICK_S]
    assert requests.scheduled_s.tolist() == [2.5 * TICK_S, 12.5 * TICK_S]
    assert requests.first_token_s.tolist() == [3.5 * TICK_S, 13.5 * TICK_S]
    assert requests.finished_s.tolist() == [6.5 * TICK_S, 13.5 * TICK_S]


def test_behind_the_frontend_a_request_waits_for_the_plan_made_ahead(make_world, ask):
    """The first runs from tick 3 on: boundaries are whole ticks. The second, sent at 3.75, is known at 6.75,
    in the iteration that ends at 7, with the one up to 8 planned.
    """
    world = make_world(ask(0.0, 4, 30), ask(3.75 * TICK_S, 4, 2), frontend_s=3 * TICK_S, plans_ahead=True)
    requests = assert_leap_equals_step(world).records.requests
    assert requests.scheduled_s.tolist() == [3 * TICK_S, 8 * TICK_S]


def test_a_closed_loop_waits_for_the_frontend_each_time(make_world, ask):
    """One user, two requests of 3 tokens: 1 + 3 ticks, one of thinking, 1 + 3 ticks."""
    world = make_world(
        ask(0.0, 4, 3), ask(0.0, 4, 3), num_users=1, think_s=TICK_S, frontend_s=TICK_S, plans_ahead=True
    )
    requests = assert_leap_equals_step(world).records.requests
    assert requests.finished_s.tolist() == [4 * TICK_S, 9 * TICK_S]


def test_a_request_that_can_never_be_served_is_rejected_on_arrival(make_world, ask):
    """No frontend's time, no plan made ahead: the record closes at once."""
    world = make_world(
        ask(0.0, 4, 30),
        ask(4.5 * TICK_S, 50, 2),
        max_model_len=40,
        frontend_s=TICK_S,
        plans_ahead=True,
    )
    requests = assert_leap_equals_step(world).records.requests
    assert requests.status.tolist() == ["finished", "rejected"]
    assert requests.finished_s[1] == 4.5 * TICK_S


def test_a_second_arrival_can_cut_a_leap_shorter_but_never_longer(make_world, ask):
    """Iterations of 1 tick; the boundary for the arrival at 4.5 is 5, and for that at 4.8 too."""
    world = make_world(
        ask(0.0, 4, 30), ask(4.5 * TICK_S, 4, 2), ask(4.8 * TICK_S, 4, 2), ask(5.0 * TICK_S, 4, 2)
    )
    run = assert_leap_equals_step(world)
    assert run.records.requests.scheduled_s.tolist()[1:] == [5 * TICK_S] * 3
    assert leaps(run)[:3] == [1, 4, 1]


@pytest.mark.parametrize(
    ("patience_ticks", "tokens"),
    [(4.5, 5), (5.0, 5), (29.5, 30), (30.0, 30), (0.5, 1)],
)
def test_a_client_that_gives_up_is_let_go_at_the_next_boundary(make_world, ask, patience_ticks, tokens):
    """The iteration under way is not undone: its token counts."""
    world = make_world(ask(0.0, 4, 40), patience_s=patience_ticks * TICK_S)
    row = assert_leap_equals_step(world).records.requests.iloc[0]
    assert (row.status, row.output_tokens) == ("aborted", tokens)
    assert row.finished_s == row.last_token_s == tokens * TICK_S


@pytest.mark.parametrize(("until_ticks", "tokens"), [(0.5, 0), (1.0, 1), (4.5, 4), (5.0, 5), (99.0, 30)])
def test_a_time_limit_keeps_the_iterations_that_ended_by_then(make_world, ask, until_ticks, tokens):
    world = make_world(ask(0.0, 4, 30), until_s=until_ticks * TICK_S)
    records = assert_leap_equals_step(world).records
    assert records.requests.output_tokens.tolist() == [tokens]
    assert records.requests.status.tolist() == ["finished" if tokens == 30 else "unfinished"]
    assert len(records.iterations) == tokens
    assert records.end_s == min(until_ticks, 30) * TICK_S  # a run that is over does not wait for the limit


def test_a_preemption_is_counted_once_however_long_the_leap_behind_it(make_world, ask):
    """Four blocks of 4. The normal request came first and needs its third block first, when all are taken: it
    is the one to go, and the step is left empty. The urgent one then goes on alone, leaping.
    """
    world = make_world(
        ask(0.0, 4, 30, priority=1),
        ask(0.5 * TICK_S, 5, 11, priority=0),
        scheduling=Priority(),
        caching=Paged(block_size=4),
        num_blocks=4,
    )
    run = assert_leap_equals_step(world)
    assert run.records.requests.preemptions.tolist() == [1, 0]
    assert run.records.iterations.preempted.sum() == 1


def test_a_long_prompt_is_leapt_over_chunk_by_chunk(make_world, ask):
    """Budget 8: 100 tokens are twelve chunks of 8 and one of 4, which is a plan of its own."""
    world = make_world(ask(0.0, 100, 2), batching=Chunked(max_num_batched_tokens=8))
    run = assert_leap_equals_step(world)
    assert leaps(run) == [12, 1, 1]
    assert run.records.iterations.prefill_tokens.tolist() == [8] * 12 + [4, 0]
    assert run.records.iterations.kv_blocks_used.tolist() == [*range(2, 26, 2), 25, 26]


def test_kv_that_is_loaded_takes_no_place_among_the_partial_prefills(make_world, ask):
    """Two swapped out, one prompt at a time: both come back in one step, and the next decides alike."""
    world = make_world(
        *[ask(0.0, 1, 8)] * 6,
        batching=PartialPrefills(
            max_num_batched_tokens=4, max_num_partial_prefills=2, max_long_partial_prefills=1
        ),
        scheduling=Fcfs(preemption_mode="swap"),
        caching=PrefixCaching(block_size=2),
        num_blocks=6,
        num_swap_blocks=4,
        links=partial(Links, bytes_per_token=1.0, host_bytes_per_s=8.0),
        max_num_seqs=4,
    )
    run = assert_leap_equals_step(world)
    assert run.records.requests.preemptions.sum() > 2


def test_two_whose_kv_takes_turns_in_memory_come_to_an_end(make_world, ask):
    """Neither finds room for its next tokens beside the other's KV, which is on its way in when it asks."""
    world = make_world(
        *[ask(0.0, 6, 20)._replace(branching=Branching(3))] * 2,
        scheduling=Fcfs(preemption_mode="swap"),
        caching=Paged(block_size=2),
        num_blocks=40,
        num_swap_blocks=100,
        links=partial(Links, bytes_per_token=1.0, host_bytes_per_s=16.0),
        max_num_seqs=8,
    )
    run = assert_leap_equals_step(world)
    assert run.records.requests.status.tolist() == ["finished"] * 2
    assert run.records.requests.preemptions.sum() > 0


@pytest.mark.parametrize("half_ticks", range(20, 60))
def test_a_run_may_end_while_kv_is_on_its_way_or_has_just_come(make_world, ask, half_ticks):
    """A sequence that comes back has its newest token from before its preemption."""
    world = make_world(
        *[ask(0.0, 6, 40)] * 3,
        scheduling=Fcfs(preemption_mode="swap"),
        caching=Paged(block_size=4),
        num_blocks=14,
        num_swap_blocks=100,
        links=partial(Links, bytes_per_token=1.0, host_bytes_per_s=21.0),
        until_s=half_ticks * TICK_S,
    )
    assert_leap_equals_step(world)


@pytest.mark.parametrize("half_ticks", range(45, 68))
def test_an_iteration_that_a_cut_interrupts_has_taken_its_blocks(make_world, ask, half_ticks):
    """Of 16 blocks of 2 tokens, the first request leaves 6 in the cache. The second starts at tick 10 with 4
    tokens; each iteration takes the blocks of its tokens at its start, also in the middle of a leap.
    """
    world = make_world(
        ask(0.0, 4, 10),
        ask(10 * TICK_S, 4, 24),
        caching=PrefixCaching(block_size=2),
        num_blocks=16,
        until_s=half_ticks / 2 * TICK_S,
    )
    run = assert_leap_equals_step(world)
    num_tokens = 4 + half_ticks // 2 - 10
    assert run.records.num_evicted_blocks == max(0, -(-num_tokens // 2) - 10)
