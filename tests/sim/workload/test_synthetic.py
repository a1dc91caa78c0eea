"""Synthetic traffic, open and closed loop: reproducible, clipped and counted, independent of the engine."""

import numpy as np
import pytest

from sim.workload.arrivals import ClosedLoop, Constant, Poisson
from sim.workload.distributions import Exponential, Fixed, Lengths, Lognormal
from sim.workload.synthetic import Synthetic


def fixed_lengths(prompt=10, output=5):
    return Lengths(prompt_tokens=Fixed(value=prompt), output_tokens=Fixed(value=output))


def make_synthetic(**settings):
    given = {
        "arrivals": Poisson(rate_per_s=2.0),
        "lengths": Lengths(
            prompt_tokens=Lognormal(mean=100, cv=1.0), output_tokens=Lognormal(mean=50, cv=1.0)
        ),
        "num_requests": 200,
    }
    return Synthetic(**(given | settings))


def users(num_users=3, think_time_s=None, **settings):
    return ClosedLoop(num_users=num_users, think_time_s=think_time_s or Fixed(value=2.0), **settings)


def rows_of(source):
    return [
        (a.request.request_id, a.request.arrival_s, a.request.prompt.num_tokens, a.num_output_tokens)
        for a in source.arrivals()
    ]


def run_closed(source, service_s):
    """Plays a source to its end; returns (user, prompt tokens, output tokens, arrival_s) of every request."""
    sent = []
    pending = list(source.arrivals())
    while pending:
        first = min(pending, key=lambda a: a.request.arrival_s + service_s(a.request))
        pending.remove(first)
        r = first.request
        sent.append((r.session_id, r.prompt.num_tokens, first.num_output_tokens, r.arrival_s))
        pending += source.follow_ups(r, r.arrival_s + service_s(r), first.num_output_tokens)
    return sent


def test_the_same_seed_gives_the_same_requests_and_another_seed_others():
    workload = make_synthetic()
    once = rows_of(workload.source(seed=3, max_model_len=4096))
    assert once == rows_of(workload.source(seed=3, max_model_len=4096))
    assert once != rows_of(workload.source(seed=4, max_model_len=4096))


def test_ids_are_consecutive_and_arrivals_sorted_across_chunks():
    rows = rows_of(make_synthetic(num_requests=9000).source(seed=0, max_model_len=4096))
    assert [row[0] for row in rows] == list(range(9000))
    assert (np.diff([row[1] for row in rows]) >= 0).all()


def test_changing_the_arrivals_leaves_the_lengths_alone():
    a = rows_of(make_synthetic().source(seed=0, max_model_len=4096))
    b = rows_of(make_synthetic(arrivals=Constant(rate_per_s=1.0)).source(seed=0, max_model_len=4096))
    assert [row[2:] for row in a] == [row[2:] for row in b]


def test_open_loop_traffic_expects_its_number_and_has_no_follow_up():
    source = make_synthetic().source(seed=0, max_model_len=4096)
    first = next(source.arrivals())
    assert source.num_requests == 200
    assert not source.follow_ups(first.request, 9.0, 5)


def test_requests_longer_than_the_context_are_clipped_and_counted():
    source = make_synthetic(lengths=fixed_lengths(100, 30)).source(seed=0, max_model_len=64)
    assert {row[2:] for row in rows_of(source)} == {(34, 30)}
    assert source.notes.num_clipped == 200


def test_max_tokens_is_seen_by_the_engine_and_ends_the_answer():
    source = make_synthetic(lengths=fixed_lengths(10, 30), max_tokens=8).source(seed=0, max_model_len=64)
    arrival = next(source.arrivals())
    assert (arrival.request.max_tokens, arrival.num_output_tokens) == (8, 8)
    assert source.notes.num_clipped == 0


def test_priority_shares_are_the_shares_of_the_priorities():
    workload = make_synthetic(num_requests=20_000, priority_shares=(0.2, 0.0, 0.8))
    drawn = [a.request.priority for a in workload.source(seed=0, max_model_len=4096).arrivals()]
    shares = np.bincount(drawn) / len(drawn)
    assert shares == pytest.approx([0.2, 0.0, 0.8], abs=2.576 * np.sqrt(0.16 / 20_000))


def test_closed_loop_users_think_after_each_answer():
    """Two users, 1 s of service, 2 s of thinking: a request each every 3 s, the second user 1.5 s behind."""
    loop = users(num_users=2, ramp_up_s=3.0)
    source = make_synthetic(arrivals=loop, num_requests=5).source(seed=0, max_model_len=4096)
    sent = run_closed(source, service_s=lambda request: 1.0)
    assert [(user, arrival_s) for user, _, _, arrival_s in sent] == [
        (0, 0.0),
        (1, 1.5),
        (0, 3.0),
        (1, 4.5),
        (0, 6.0),
    ]


def test_what_a_user_sends_does_not_depend_on_the_order_of_service():
    loop = users(num_users=5, think_time_s=Exponential(mean=1.0))
    workload = make_synthetic(arrivals=loop, num_requests=None, duration_s=60.0)

    def by_user(service_s):
        sent = run_closed(workload.source(seed=0, max_model_len=4096), service_s)
        return [[row[1:3] for row in sent if row[0] == user] for user in range(5)]

    even, uneven = by_user(lambda request: 0.5), by_user(lambda request: 0.1 + request.session_id)
    for a, b in zip(even, uneven, strict=True):
        shared = min(len(a), len(b))
        assert shared > 3
        assert a[:shared] == b[:shared]
    assert max(map(len, even)) > 16  # past the first block of turns


def test_closed_loop_keeps_both_limits():
    by_count = make_synthetic(arrivals=users(), num_requests=7).source(seed=0, max_model_len=4096)
    assert len(run_closed(by_count, lambda request: 1.0)) == 7
    in_time = make_synthetic(arrivals=users(), num_requests=None, duration_s=10.0).source(
        seed=0, max_model_len=4096
    )
    assert max(row[3] for row in run_closed(in_time, lambda request: 1.0)) == 9.0
    more_users = make_synthetic(arrivals=users(num_users=9), num_requests=4).source(
        seed=0, max_model_len=4096
    )
    assert len(run_closed(more_users, lambda request: 1.0)) == 4


def test_closed_loop_counts_the_clipped_requests_that_were_sent():
    source = make_synthetic(arrivals=users(), num_requests=7, lengths=fixed_lengths(100, 30)).source(
        seed=0, max_model_len=64
    )
    run_closed(source, lambda request: 1.0)
    assert source.notes.num_clipped == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_requests": None}, "num_requests=null, duration_s=null: at least one must be set"),
        ({"num_requests": 0}, "num_requests=0: must be finite and > 0"),
        ({"duration_s": -1.0}, "duration_s=-1.0: must be finite and > 0 s"),
        ({"patience_s": 0.0}, "patience_s=0.0: must be finite and > 0 s"),
        ({"max_tokens": 0}, "max_tokens=0: must be finite and > 0 tokens"),
        ({"priority_shares": (0.5, 0.6)}, r"priority_shares=\[0.5, 0.6\]: must be >= 0 and sum to 1"),
        (
            {"arrivals": users(think_time_s=Fixed(value=0)), "num_requests": None, "duration_s": 5.0},
            "num_requests=null: must be set if the think time of users is 0 s",
        ),
    ],
)
def test_rejects_settings_that_end_nowhere_or_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        make_synthetic(**settings)


def test_rejects_a_duration_in_which_nothing_arrives():
    workload = make_synthetic(num_requests=None, duration_s=1e-9)
    with pytest.raises(ValueError, match=r"duration_s=1e-09: must be longer; no request arrives"):
        workload.source(seed=0, max_model_len=4096)


def test_exact_limits_ask_for_just_the_tokens_that_come():
    arrivals = list(make_synthetic(max_tokens="exact").source(seed=0, max_model_len=4096).arrivals())
    assert all(a.request.max_tokens == a.num_output_tokens for a in arrivals)
    assert len({a.num_output_tokens for a in arrivals}) > 10
    plain = list(make_synthetic().source(seed=0, max_model_len=4096).arrivals())
    assert [a.num_output_tokens for a in plain] == [a.num_output_tokens for a in arrivals]
    assert {a.request.max_tokens for a in plain} == {None}
    loop = make_synthetic(arrivals=users(), max_tokens="exact", num_requests=20)
    assert all(
        a.request.max_tokens == a.num_output_tokens
        for a in loop.source(seed=0, max_model_len=4096).arrivals()
    )


def test_deadlines_follow_the_priority():
    workload = make_synthetic(priority_shares=(0.5, 0.5), deadlines_s=(None, 60.0))
    requests = [a.request for a in workload.source(seed=0, max_model_len=4096).arrivals()]
    assert {r.priority for r in requests} == {0, 1}
    assert all(r.deadline_s == (r.arrival_s + 60.0 if r.priority else None) for r in requests)
    loop = make_synthetic(arrivals=users(), deadlines_s=(5.0,), num_requests=20)
    assert [
        a.request.deadline_s - a.request.arrival_s for a in loop.source(seed=0, max_model_len=4096).arrivals()
    ] == [5.0] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": "exactly"}, "max_tokens=exactly: must be a number of tokens, exact, or null"),
        ({"max_tokens": 0}, "max_tokens=0: must be finite and > 0"),
        ({"deadlines_s": (0.0,)}, r"deadlines_s=\[0.0\]: must be finite and > 0 s"),
        ({"deadlines_s": (1.0, 2.0)}, r"deadlines_s=\[1.0, 2.0\]: must have one value for each"),
    ],
)
def test_limits_and_deadlines_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_synthetic(**settings)
