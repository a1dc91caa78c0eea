"""Routers, called directly: by load, in turns, at random, by session, by deadline and by cost."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.routing.load_balancing import (
    Freest,
    JoinShortestKv,
    LeastOutstanding,
    PowerOfTwo,
    Random,
    RoundRobin,
    Weighted,
)
from policies.routing.prefix_aware import PrefixAffinity, PrefixIndex, WeightedScore
from policies.routing.session_affinity import SessionAffinity
from policies.routing.slo_aware import CostAware, SloAware, TtftEstimates
from tests.policies.routing.called import ask, choices, idle, replicas


def test_round_robin_goes_around_whatever_the_load(make_request):
    assert choices(RoundRobin(), replicas(9, 0, 5), make_request, 7) == [0, 1, 2, 0, 1, 2, 0]


def test_least_outstanding_takes_the_shortest_queue_and_the_first_of_equals(make_request):
    choose = LeastOutstanding().choose
    assert choose(make_request(), replicas(3, 2, 4), 0.0) == 1
    assert choose(make_request(), replicas(3, 2, 2), 0.0) == 1
    assert choose(make_request(), replicas(0, 0, 0), 0.0) == 0


def test_least_outstanding_may_count_tokens(make_request):
    views = replicas(1, 2, 3, num_outstanding_tokens=[900, 30, 31])
    assert LeastOutstanding(count="tokens").choose(make_request(), views, 0.0) == 1


def test_random_is_even_and_the_same_for_the_same_request(make_request):
    chosen = choices(Random(seed=1), idle(4), make_request, 4000)
    assert chosen == choices(Random(seed=1), idle(4), make_request, 4000)
    assert chosen != choices(Random(seed=2), idle(4), make_request, 4000)
    counts = Counter(chosen)
    # chi-square with 3 degrees of freedom: 16.3 is exceeded once in a thousand
    assert sum((counts[i] - 1000) ** 2 / 1000 for i in range(4)) < 16.3


def test_weights_are_shares_in_turns(make_request):
    assert choices(Weighted(weights=(2, 1)), idle(2), make_request, 6) == [0, 0, 1, 0, 0, 1]
    assert choices(Weighted(), idle(3), make_request, 6) == [0, 1, 2, 0, 1, 2]


@given(weights=st.lists(st.integers(1, 20), min_size=1, max_size=8), num_requests=st.integers(1, 300))
def test_weighted_replicas_get_their_shares_at_any_time(weights, num_requests):
    """At virtual time V replica i was due floor(w_i V) times, so of m requests it has about w_i V, and m / W
    <= V <= (m + n) / W; requests due at V itself may still be missing.
    """
    routing, views = Weighted(weights=tuple(map(float, weights))), idle(len(weights))
    counts = Counter(routing.choose(ask(i, (0, 4)), views, 0.0) for i in range(num_requests))
    for index, weight in enumerate(weights):
        share = num_requests * weight / sum(weights)
        most = (num_requests + len(weights)) * weight / sum(weights)
        assert share - 2 < counts[index] <= most + 1e-6


def test_power_of_two_takes_the_less_loaded_of_those_drawn(make_request):
    """Loads 0, 1, 2 drawn in pairs: the replica with 0 wins two of three pairs, 1 one, 2 none."""
    counts = Counter(choices(PowerOfTwo(), replicas(1, 0, 2), make_request, 3000))
    assert counts[2] == 0
    assert counts[1] == pytest.approx(2000, abs=120)
    views = replicas(0, 0, 0, num_outstanding_tokens=[5, 7, 6])
    assert set(choices(PowerOfTwo(count="tokens"), views, make_request, 300)) == {0, 2}


def test_all_choices_are_least_outstanding_and_one_is_random(make_request):
    views = replicas(3, 2, 4, 2)
    assert set(choices(PowerOfTwo(num_choices=4), views, make_request, 50)) <= {1, 3}
    assert set(choices(PowerOfTwo(num_choices=1), views, make_request, 200)) == {0, 1, 2, 3}


@pytest.mark.parametrize("num_choices", [1, 2, 3, 5])
def test_every_replica_is_drawn_alike_and_none_twice(num_choices):
    routing, seen = PowerOfTwo(num_choices=num_choices), Counter()
    for request_id in range(2000):
        drawn = routing._drawn(ask(request_id, (0, 4)), 5)
        assert len(set(drawn)) == num_choices
        seen.update(drawn)
    expected = 2000 * num_choices / 5
    assert all(count == pytest.approx(expected, abs=5 * expected**0.5) for count in seen.values())


def test_freest_divides_the_free_memory_by_the_requests(make_request):
    """1,000 free for 4 requests, 600 for 2, 900 for 2 with 400 of it for prompts in the queue."""
    free = {"num_free_kv_tokens": [1000, 600, 900], "num_queued_tokens": [0, 0, 400]}
    assert Freest().choose(make_request(), replicas(4, 2, 2, **free), 0.0) == 1
    assert Freest().choose(make_request(), replicas(4, 2, 0, **free), 0.0) == 2


def test_join_shortest_kv_takes_off_what_was_sent_since(make_request):
    views = replicas(5, 6, 1, num_free_kv_tokens=[100, 120, 90], num_unseen_tokens=[0, 0, 0])
    choose = JoinShortestKv().choose
    assert choose(make_request(), views, 0.0) == 1
    views[1].num_unseen_tokens = 25
    assert choose(make_request(), views, 0.0) == 0
    views[2].num_free_kv_tokens = 100
    assert choose(make_request(), views, 0.0) == 2  # as much, and fewer requests


def test_a_session_stays_and_sessions_spread():
    routing, views = SessionAffinity(), idle(8)

    def homes(first_id):
        return [routing.choose(ask(first_id + i, (0, 4), session_id=i), views, 0.0) for i in range(800)]

    assert homes(0) == homes(900)
    counts = Counter(homes(0))
    assert min(counts.values()) > 50  # 100 on average; a ring of 100 points each is uneven by about 10 %


def test_one_replica_more_moves_few_sessions_and_only_to_itself():
    eight, nine = SessionAffinity(), SessionAffinity()
    asks = [ask(session, (0, 4), session_id=session) for session in range(900)]
    moves = [(eight.choose(a, idle(8), 0.0), nine.choose(a, idle(9), 0.0)) for a in asks]
    moved = [new for old, new in moves if old != new]
    assert set(moved) == {8}
    assert len(moved) == pytest.approx(100, abs=50)


@given(loads=st.lists(st.integers(0, 30), min_size=1, max_size=6), session=st.integers(0, 50))
def test_no_replica_above_its_bound_is_chosen_and_the_first_below_it_is(loads, session):
    """The order on the ring, by brute force: the replicas as they are reached with all previous ones full."""
    request, views = ask(0, (0, 4), session_id=session), replicas(*loads)
    bound = -(-5 * (sum(loads) + 1) // (4 * len(loads)))  # ceil(1.25 * (total + 1) / replicas)
    chosen = SessionAffinity(max_load=1.25).choose(request, views, 0.0)
    assert loads[chosen] < bound
    full, order = set(), []
    while len(full) < len(loads):
        low = [10**6 if i in full else 0 for i in range(len(loads))]
        order.append(SessionAffinity(max_load=1.0001).choose(request, replicas(*low), 0.0))
        full.add(order[-1])
    assert chosen == next(index for index in order if loads[index] < bound)
    assert order[0] == SessionAffinity(max_load=float("inf")).choose(request, views, 0.0)


def queued(*tokens):
    return replicas(*[0] * len(tokens), num_queued_tokens=list(tokens))


def test_slo_aware_fills_the_fullest_that_is_in_time(make_request):
    """100 tokens/s: 50 of its own and 60, 40, 10 in front take 1.1, 0.9 and 0.6 s."""
    least = SloAware(ttft_s=1, initial_tokens_per_s=100)
    assert least.choose(make_request(0, 50), queued(60, 40, 10), 0.0) == 1
    most = SloAware(ttft_s=1, headroom="most", initial_tokens_per_s=100)
    assert most.choose(make_request(0, 50), queued(60, 40, 10), 0.0) == 2
    assert least.choose(make_request(1, 50), queued(60, 90, 70), 0.0) == 0  # none is in time: the first


def test_estimates_learn_how_fast_each_replica_is(make_request):
    estimates = TtftEstimates(initial_tokens_per_s=100)
    request = make_request(0, 50)
    estimates.sent_to(request, queued(30)[0], 5.0)
    estimates.first_token(request, 7.0)  # 80 tokens in 2 s
    estimates.ended(request)
    assert estimates.estimate_s(0, 80) == 2.0
    assert estimates.estimate_s(1, 80) == 0.8
    second = make_request(1, 100)
    estimates.sent_to(second, queued(0)[0], 10.0)
    estimates.first_token(second, 11.0)  # 100 tokens/s: 40 + 0.1 * 60
    assert estimates.estimate_s(0, 46) == pytest.approx(1.0)


def test_slo_aware_forgets_requests_that_gave_up(make_request, bytes_held):
    routing = SloAware()
    before = bytes_held(routing)
    routing.choose(make_request(0), queued(0), 0.0)
    assert bytes_held(routing) > before
    routing.on_end(make_request(0), 1.0)
    assert bytes_held(routing) == before


def test_cost_aware_takes_the_cheapest_in_time(make_request):
    routing = CostAware(ttft_s=1, initial_tokens_per_s=100)

    def priced(*num_queued_tokens):
        views = queued(*num_queued_tokens)
        for view, price in zip(views, (4, 2, 2), strict=True):
            view.price_usd_per_hour = price
        return views

    assert routing.choose(make_request(0, 50), priced(0, 40, 30), 0.0) == 2  # of equals the faster
    assert routing.choose(make_request(1, 50), priced(0, 60, 51), 0.0) == 0
    assert routing.choose(make_request(2, 50), priced(80, 60, 70), 0.0) == 1  # none in time


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LeastOutstanding(count="bytes"), r"^count=bytes: must be one of requests, tokens$"),
        (lambda: PowerOfTwo(count="kv"), r"^count=kv: must be one of requests, tokens$"),
        (lambda: PowerOfTwo(num_choices=0), r"^num_choices=0: must be >= 1 replica$"),
        (lambda: PowerOfTwo(num_choices=4).check(3), r"^num_choices=4: must be <= 3, the number"),
        (lambda: Weighted(weights=(1, 0)), r"^weights\[1\]=0: must be a finite number > 0$"),
        (lambda: Weighted(weights=(1, 2)).check(3), r"^weights=\[1, 2\]: must have 3 values, .* 2;"),
        (lambda: CostAware(ttft_s=0), r"^ttft_s=0: must be a finite number > 0 s$"),
        (lambda: SloAware(initial_tokens_per_s=float("nan")), r"^initial_tokens_per_s=nan: must be a finite"),
        (lambda: SloAware(headroom="some"), r"^headroom=some: must be one of least, most$"),
        (lambda: SessionAffinity(max_load=1), "^max_load=1: must be > 1; inf for no bound"),
        (lambda: SessionAffinity(num_points=0), r"^num_points=0: must be >= 1$"),
        (lambda: PrefixAffinity(cache_threshold=1.5), "^cache_threshold=1.5: must be a share, >= 0 and <= 1"),
        (lambda: PrefixAffinity(balance_abs_threshold=-1), r"^balance_abs_threshold=-1: must be >= 0"),
        (lambda: PrefixAffinity(balance_rel_threshold=0.5), r"^balance_rel_threshold=0.5: must be >= 1"),
        (lambda: PrefixAffinity(max_tree_tokens=0), r"^max_tree_tokens=0: must be >= 1 token$"),
        (lambda: PrefixIndex(overlap_weight=-1), r"^overlap_weight=-1: must be a finite number >= 0$"),
        (lambda: WeightedScore(kv_weight=float("inf")), r"^kv_weight=inf: must be a finite number >= 0$"),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [RoundRobin, lambda: Weighted(weights=(1.0, 3.0, 0.5))])
def test_many_choices_are_those_of_single_requests(make, make_request):
    one, many, views = make(), make(), idle(3)
    singles = choices(one, views, make_request, 40)
    chosen = np.concatenate([many.choose_many(count, views) for count in (7, 0, 1, 22)])
    assert chosen.tolist() == singles[:30]
    assert choices(many, views, make_request, 10) == singles[30:]
