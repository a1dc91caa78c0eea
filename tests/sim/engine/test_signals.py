"""Signals that a router reads: as old as configured, computed lazily, and equal to a refresh on time."""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import replace
from math import inf
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.conformance.policy_draws import draw_routing
from experiments.conformance.promises import leap_equals_step
from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.routing.prefix_aware import PrefixIndex
from policies.scheduling.fcfs import Fcfs
from sim.engine.signals import Signals

TICK_S = 0.125

READINGS = []
"""What `Spy` has read: (now, replica, reading)."""


class Spy:
    """Sends round robin, and logs the readings of all replicas, or only of the one whose turn it is."""

    def __init__(self, reads_all=True, looks=False):
        self.reads_all = reads_all
        self.reads_caches, self.reads_signals = looks, True
        self.turn = -1

    def choose(self, request, replicas, now):
        self.turn = (self.turn + 1) % len(replicas)
        for index, replica in enumerate(replicas):
            if self.reads_all or index == self.turn:
                READINGS.append((now, index, self.reading(request, replica)))
        return self.turn

    def reading(self, request, replica):
        found = replica.num_cached(request) if self.reads_caches else None
        used = replica.num_kv_tokens - replica.num_free_kv_tokens
        unseen = replica.num_unseen, replica.num_unseen_tokens
        own = replica.num_outstanding, replica.num_outstanding_tokens, replica.num_queued_tokens
        return (replica.num_running, replica.num_waiting, used, *unseen, *own, found)


def run_world(world, **given):
    """Returns the log of readings and the records of a run."""
    READINGS.clear()
    leap = given.pop("leap", True)
    records = replace(world, routing=Spy(**given)).simulate(leap=leap).records
    return list(READINGS), records


@st.composite
def draw_spied(draw, worlds):
    """Draws a world in which replicas become idle only when no request waits.

    Their counts are then those of the last iteration, or zero.
    """
    world = draw(worlds)
    return replace(
        world,
        num_replicas=draw(st.integers(1, 3)),
        batching=Chunked(max_num_batched_tokens=draw(st.integers(1, 64))),
        scheduling=Fcfs(),
        caching=Paged(block_size=world.caching.block_size),
        max_model_len=4096,
    )


@given(data=st.data())
def test_signals_are_those_of_the_last_iteration_that_began_before_a_refresh_on_time(data, worlds):
    """The truth is the table of iterations, written without any thought of signals: one row an iteration."""
    world = data.draw(draw_spied(worlds))
    log, records = run_world(world)
    by_replica = dict(iter(records.iterations.groupby("replica")))
    for now, index, (running, waiting, used, *_) in log:
        at_s = refreshed_s(world.signal_age_s, now)
        if index not in by_replica:  # nothing was done, or the run ended in the middle of its first iteration
            assert (running, waiting, used) == (0, 0, 0) or world.until_s is not None
            continue
        table = by_replica[index]
        row = bisect_left(table.start_s.tolist(), at_s) - 1
        if row < 0:
            assert (running, waiting, used) == (0, 0, 0)
            continue
        last = table.iloc[row]
        expected = (last.running, last.waiting, last.kv_blocks_used * records.pools[0].block_size)
        ended = last.start_s + last.duration_s <= at_s
        # Behind its end the replica may have planned that there is nothing to do.
        assert (running, waiting, used) in ([expected, (0, 0, 0)] if ended else [expected])
        if ended and row + 1 < len(table) and table.iloc[row + 1].start_s <= last.start_s + last.duration_s:
            assert (running, waiting, used) == expected


def refreshed_s(age_s, now):
    """Computes the time of the last refresh in seconds by counting multiples of the age, as a timer would."""
    if not age_s:
        return now
    period = max(0, int(now / age_s) - 2)
    while (period + 1) * age_s <= now:
        period += 1
    return period * age_s


@given(data=st.data())
def test_leaping_or_reading_more_changes_no_reading(data, worlds):
    """Any engine; with and without a look into the caches, which cuts leaps."""
    world = replace(data.draw(worlds), num_replicas=data.draw(st.integers(1, 3)))
    looks = data.draw(st.booleans())
    log, records = run_world(world, looks=looks)
    stepped, _ = run_world(world, looks=looks, leap=False)
    assert log == stepped
    few, _ = run_world(world, looks=looks, reads_all=False)
    everything = set(log)
    assert set(few) <= everything
    if not looks:
        _, unread = run_world(world, looks=True)
        assert unread.requests.equals(records.requests)


@given(data=st.data())
def test_leap_equals_step_for_routers_of_caches_under_pressure(data, worlds):
    world = data.draw(worlds)
    block_size = data.draw(st.sampled_from([1, 4]))
    num_replicas = data.draw(st.integers(2, 3))
    cache = data.draw(st.sampled_from([PrefixCaching(block_size=block_size), Radix(block_size=block_size)]))
    world = replace(
        world,
        num_replicas=num_replicas,
        caching=cache,
        num_blocks=data.draw(st.integers(40, 100)) // block_size,
        routing=data.draw(st.just(PrefixIndex()) | draw_routing(num_replicas, world.model.tick_s)),
    )
    leap_equals_step(world)


@given(data=st.data())
def test_leap_equals_step_for_any_router(data, worlds):
    world = data.draw(worlds)
    num_replicas = data.draw(st.integers(2, 4))
    leap_equals_step(
        replace(
            world,
            num_replicas=num_replicas,
            routing=data.draw(draw_routing(num_replicas, world.model.tick_s)),
        )
    )


def test_by_hand(make_world, ask):
    """Iterations of a tick, signals refreshed every two ticks. Requests of 4 tokens in blocks of 4.

    The first runs from 0 to 8. At 1.5 the refresh at 0 is seen: nothing had begun. At 2.5 that at 2: the
    iteration from 1 to 2 had two blocks, and the request of 1.5 was not there yet. At 4.5 that at 4: the
    iteration from 3 to 4 has all three that had come, with 7, 5 and 4 tokens in 2 + 2 + 1 blocks.
    """
    world = make_world(
        *[ask(ticks * TICK_S, 4, 8) for ticks in (0, 1.5, 2.5, 4.5)],
        caching=Paged(block_size=4),
        signal_age_s=2 * TICK_S,
    )
    log, _ = run_world(world)
    assert [(now / TICK_S, reading) for now, _, reading in log] == [
        # running, waiting, tokens in blocks; unseen and their tokens; outstanding, their tokens, queued
        (0, (0, 0, 0, 0, 0, 0, 0, 0, None)),
        (1.5, (0, 0, 0, 1, 4, 1, 4, 0, None)),
        (2.5, (1, 0, 8, 1, 4, 2, 8, 4, None)),
        (4.5, (3, 0, 20, 0, 0, 3, 12, 0, None)),
    ]


def test_fresh_signals_tell_of_the_iteration_under_way(make_world, ask):
    """Age 0, one slot: at 2.5 the first runs; at 3.5 the second waits, seen by the plan at 3."""
    world = make_world(
        *[ask(ticks * TICK_S, 4, 20) for ticks in (0, 2.5, 3.5)], max_num_seqs=1, signal_age_s=0.0
    )
    log, _ = run_world(world)
    assert [reading[:4] for _, _, reading in log] == [(0, 0, 0, 0), (1, 0, 8, 0), (1, 1, 8, 0)]


def test_a_refused_request_is_not_counted(make_world, ask):
    world = make_world(ask(0.0, 50, 2), ask(TICK_S, 4, 2), max_model_len=40, signal_age_s=0.0)
    log, _ = run_world(world)
    assert log[1][2] == (0, 0, 0, 0, 0, 0, 0, 0, None)


@pytest.mark.parametrize(
    ("make_cache", "found"),
    [(lambda: PrefixCaching(block_size=4), 8), (lambda: Radix(block_size=1), 9)],
    ids=["prefix", "radix"],
)
def test_caches_are_seen_as_of_the_iteration_under_way(make_world, ask, make_cache, found):
    """A prompt of 9 named tokens runs on replica 0. The next with the same 9 and 3 more finds them there."""
    contents = ((7, 9), (8, 3))
    world = make_world(
        ask(0.0, 9, 30, contents=contents[:1]),
        ask(2.5 * TICK_S, 12, 2, contents=contents),
        caching=make_cache(),
        num_replicas=2,
    )
    log, _ = run_world(world, looks=True)
    assert [reading[-1] for now, index, reading in log if now] == [found, 0]


def test_what_a_leap_has_evicted_is_not_found(make_world, ask):
    """Ten blocks of 4. Content 7, 4 blocks, is left behind by the first. The second's prompt is 3 blocks, the
    iteration from 1.5 + k on needs ceil((12 + k) / 4): 7 from 14.5 on, when the blank ones are used up and
    the tail of content 7 goes, 8 from 18.5, 9 from 22.5 on.
    """
    world = make_world(
        ask(0.0, 16, 1, contents=((7, 16),)),
        ask(1.5 * TICK_S, 12, 26),
        *[ask((ticks + 0.25) * TICK_S, 17, 1, contents=((7, 16),)) for ticks in (8, 16, 20, 24)],
        caching=PrefixCaching(block_size=4),
        num_blocks=10,
        max_num_seqs=1,
    )
    leapt, _ = run_world(world, looks=True)
    stepped, _ = run_world(world, looks=True, leap=False)
    assert leapt == stepped
    assert [reading[-1] for *_, reading in leapt[2:]] == [16, 12, 8, 4]


@pytest.mark.parametrize("plans_ahead", [False, True])
@pytest.mark.parametrize("known_after", [0.5, 1.0, 1.25])
def test_a_look_behind_an_arrival_does_not_let_it_in_early(make_world, ask, known_after, plans_ahead):
    """The world of the test above. A request reaches the engine in the middle of a leap that evicts; the next
    one looks into the cache before the iteration is over: the leap is cut where the engine did not know the
    first yet.
    """
    world = make_world(
        ask(0.0, 16, 1, contents=((7, 16),)),
        ask(1.5 * TICK_S, 12, 26),
        ask(18.25 * TICK_S, 4, 2),
        *[ask((19 + eighths / 8) * TICK_S, 4, 2) for eighths in range(6)],
        caching=PrefixCaching(block_size=4),
        num_blocks=10,
        frontend_s=known_after * TICK_S,
        plans_ahead=plans_ahead,
    )
    leapt, records = run_world(world, looks=True)
    stepped, other = run_world(world, looks=True, leap=False)
    assert leapt == stepped
    assert records.requests.equals(other.requests)


def test_looking_into_caches_must_be_declared(make_world, ask):
    class Undeclared:
        def choose(self, request, replicas, now):
            return 0 * replicas[0].num_cached(request)

    with pytest.raises(RuntimeError, match="must declare reads_caches: ClassVar"):
        make_world(ask(0.0, 4, 2), routing=Undeclared()).simulate()

    class Declared(Undeclared):
        reads_caches: ClassVar[bool] = True

    make_world(ask(0.0, 4, 2), routing=Declared()).simulate()


def test_routers_receive_first_tokens_and_ends(make_world, ask):
    """The second is refused, the third gives up at 6 ticks, before its prompt is computed."""
    calls = defaultdict(list)

    class Listening:
        def choose(self, request, replicas, now):
            return 0

        def on_first_token(self, request, now):
            calls[request.request_id].append(("token", now / TICK_S))

        def on_end(self, request, now):
            calls[request.request_id].append(("end", now / TICK_S))

        def __deepcopy__(self, memo):
            return self

    world = make_world(
        ask(0.0, 4, 3),
        ask(0.0, 99, 3),
        ask(2 * TICK_S, 80, 3),
        max_model_len=90,
        patience_s=4 * TICK_S,
        batching=Chunked(max_num_batched_tokens=8),
        routing=Listening(),
    )
    world.simulate()
    assert calls == {0: [("token", 1), ("end", 3)], 1: [("end", 0)], 2: [("end", 6)]}


@pytest.mark.parametrize("age_s", [-1.0, inf, float("nan"), 1e-9])
def test_bad_ages_are_refused(age_s):
    with pytest.raises(ValueError, match=rf"signal_age_s={age_s}: must be 0 or a finite number >= 1e-06 s"):
        Signals(None, None, age_s)
