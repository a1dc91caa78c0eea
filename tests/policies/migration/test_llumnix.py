"""Llumnix's freeness and its pairs, by hand."""

from dataclasses import dataclass, field
from math import inf

import pytest

from policies.migration import MovableRequest, Move, Stay
from policies.migration.llumnix import Llumnix


@dataclass
class Load:
    """A replica with 1,000 tokens of KV memory."""

    index: int = 0
    num_free_kv_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0
    num_waiting_tokens: int = 0
    num_first_waiting_tokens: int = 0
    smallest_priority: int | None = None
    pool: int = 0
    is_draining: bool = False
    is_migrating: bool = False
    num_kv_tokens: int = 1000
    movable: list = field(default_factory=list)


def full(index, *requests, **settings):
    """Returns a replica with 10 tokens free for each of its requests, given as (id, tokens, priority)."""
    movable = [MovableRequest(request_id, priority, tokens, place) for place, (request_id, tokens, priority)
               in enumerate(requests)]  # fmt: skip
    usual = {"num_free_kv_tokens": 10 * len(requests), "num_running": len(requests)}
    return Load(index, movable=movable, **usual | settings)


def free(index, num_free=500, **settings):
    return Load(index, num_free, **{"num_running": 1} | settings)


@pytest.mark.parametrize(
    ("policy", "load", "expected"),
    [
        ({}, {"num_free_kv_tokens": 1000}, inf),  # empty
        ({}, {"num_free_kv_tokens": 800, "num_running": 4}, 200),
        # A prompt of 900 waits: (800 - 900) / (4 + 1).
        ({}, {"num_free_kv_tokens": 800, "num_running": 4, "num_waiting": 1, "num_waiting_tokens": 900}, -20),
        ({"queue": "first"}, {"num_free_kv_tokens": 800, "num_running": 4, "num_waiting": 2,
                              "num_waiting_tokens": 900, "num_first_waiting_tokens": 300}, 100),
        ({}, {"num_free_kv_tokens": 800, "num_running": 4, "is_draining": True}, -inf),
        # Full beyond 100 tokens for an urgent request: (800 - 900) / 4.
        ({"urgent_priority": 0, "priority_load_tokens": 100},
         {"num_free_kv_tokens": 800, "num_running": 4, "smallest_priority": 0}, -25),
        ({"urgent_priority": 0, "priority_load_tokens": 100},
         {"num_free_kv_tokens": 800, "num_running": 4, "smallest_priority": 1}, 200),
    ],
)  # fmt: skip
def test_freeness(policy, load, expected):
    assert Llumnix(**policy).freeness(Load(**load)) == expected


def test_the_least_free_source_is_paired_with_the_freest_target():
    loads = [full(0, (7, 40, 0)), free(1, 300), full(2, (8, 40, 0), num_free_kv_tokens=0), free(3, 600)]
    assert Llumnix().moves(loads, 0.0) == [Move(8, 2, 3), Move(7, 0, 1)]


@pytest.mark.parametrize(
    ("settings", "moved"),
    [({}, 3), ({"moves_first": "shortest"}, 2), ({"moves_first": "longest"}, 1), ({"urgent_priority": 0}, 2)],
)
def test_which_request_moves(settings, moved):
    source = full(0, (1, 90, 1), (2, 30, 1), (3, 60, 0))
    assert Llumnix(**settings).moves([source, free(1)], 0.0) == [Move(moved, 0, 1)]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (full(0, (1, 40, 0), is_migrating=True), free(1)),
        (full(0, (1, 40, 0)), free(1, is_migrating=True)),
        (full(0, (1, 40, 0)), free(1, pool=1)),
        (full(0, (1, 40, 0)), free(1, num_preempted=1)),
        (full(0, (1, 40, 0)), free(1, is_draining=True)),
        (full(0, (1, 500, 0)), free(1, 500)),  # it would not fit
        (full(0, (1, 40, 0)), free(1, 48)),  # no freer than the threshold
        (full(0, (1, 40, 0), num_free_kv_tokens=48), free(1)),  # no less free than the threshold
        (full(0), free(1)),  # nothing to move
    ],
)
def test_no_moves(source, target):
    assert not Llumnix().moves([source, target], 0.0)


def test_preempted_requests_make_a_source_of_a_free_replica():
    source = full(0, (1, 40, 0), num_free_kv_tokens=900, num_preempted=1, num_waiting=1)
    assert Llumnix().moves([source, free(1)], 0.0) == [Move(1, 0, 1)]


def test_a_draining_replica_is_emptied():
    source = full(0, (1, 40, 0), num_free_kv_tokens=900, is_draining=True)
    assert Llumnix().moves([source, free(1)], 0.0) == [Move(1, 0, 1)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval_s": 0}, "interval_s=0: must be a finite number > 0 s"),
        ({"out_below_tokens": -1}, "out_below_tokens=-1: must be a finite number >= 0"),
        ({"in_above_tokens": 10}, "in_above_tokens=10: must be >= out_below_tokens=48"),
        ({"queue": "last"}, "queue=last: must be one of all, first"),
        ({"moves_first": "any"}, "moves_first=any: must be one of last, shortest, longest"),
        ({"last_stage_tokens": 0}, "last_stage_tokens=0: must be >= 1 token"),
        ({"priority_load_tokens": 0}, "priority_load_tokens=0: must be >= 1 token"),
        ({"max_stages": 1}, "max_stages=1: must be >= 2"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        Llumnix(**settings)


def test_stay_moves_nothing():
    assert Stay().interval_s is None
    assert not Stay().moves([full(0, (1, 40, 0)), free(1)], 0.0)
