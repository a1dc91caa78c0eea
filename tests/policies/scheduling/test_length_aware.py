"""The length-aware choice of a decode replica: room first, then a draw, then the share of heavy answers."""

from collections import Counter
from types import SimpleNamespace

import pytest

from policies.routing.length_aware import LengthAware


def replicas(*num_free_tokens, num_unseen_tokens=0):
    return [
        SimpleNamespace(
            index=index,
            num_free_kv_tokens=free,
            num_unseen_tokens=num_unseen_tokens,
            num_outstanding=0,
        )
        for index, free in enumerate(num_free_tokens)
    ]


@pytest.fixture
def send(make_request):
    """Sends request after request, each with a predicted length; returns the chosen index."""

    def sender(routing, views, request_id, num_predicted, num_prompt_tokens=4):
        request = make_request(request_id, num_prompt_tokens)
        routing.on_predicted(request, num_predicted)
        return routing.choose(request, views, 0.0)

    return sender


def test_heavy_answers_go_around(send):
    """Two of two drawn: each heavy one goes where fewer are, whatever light ones do in between."""
    routing, views = LengthAware(heavy_tokens=100), replicas(10**5, 10**5)
    chosen = [send(routing, views, i, 500) for i in range(6)]
    assert sorted(chosen) == [0, 0, 0, 1, 1, 1]
    assert {chosen[0], chosen[1]} == {chosen[2], chosen[3]} == {0, 1}


def test_light_answers_fill_up_where_heavy_ones_are(send):
    routing, views = LengthAware(heavy_tokens=100, num_choices=2), replicas(10**5, 10**5)
    first = send(routing, views, 0, 101)
    other = send(routing, views, 1, 100)
    # a light one: share 1/2 beside the heavy one, 0 with the light one
    assert other == 1 - first
    assert send(routing, views, 2, 5) == other
    # a heavy one: 2/2 beside the heavy one, 1/3 with two light ones
    assert send(routing, views, 3, 999) == other


def test_ends_are_forgotten(send, make_request, bytes_held):
    routing, views, sizes = LengthAware(heavy_tokens=100), replicas(10**5, 10**5), set()
    first = send(routing, views, 0, 500)
    routing.on_end(make_request(0), 1.0)
    for _ in range(10):
        assert send(routing, views, 0, 500) == first
        routing.on_end(make_request(0), 1.0)
        sizes.add(bytes_held(routing))
    assert len(sizes) == 1
    routing.on_end(make_request(7), 2.0)  # refused before it was sent


def test_replicas_without_room_for_prompt_and_answer_are_left_out(send):
    routing, views = LengthAware(), replicas(100, 104, 99)
    assert {send(routing, views, i, 100) for i in range(50)} == {1}
    views = replicas(100, 104, 199, num_unseen_tokens=50)
    assert {send(routing, views, i, 100) for i in range(50, 100)} == {2}
    views = replicas(1, 2, 3)  # none has: all are drawn from
    assert {send(routing, views, i, 100) for i in range(100, 200)} == {0, 1, 2}


def test_of_more_than_two_every_pair_is_drawn_alike(make_request):
    routing = LengthAware()
    pairs = Counter(frozenset(routing._drawn(make_request(i), [0, 1, 2, 3])) for i in range(6000))
    assert len(pairs) == 6
    assert all(count == pytest.approx(1000, abs=150) for count in pairs.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heavy_tokens": 0}, "heavy_tokens=0: must be >= 1 output token"),
        ({"num_choices": 0}, "num_choices=0: must be >= 1 replica"),
    ],
)
def test_refuses_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        LengthAware(**settings)
