"""Changes of a replica between prefill and decode: when, and which replica."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.roles import Fixed, ReplicaLoad, Switch
from policies.roles.balance import Balance


def loads(prefill, decode, is_changing=False):
    """Returns the loads of prefill replicas, by queued tokens, and of decode replicas, by KV use.

    The number of outstanding requests falls with the index.
    """
    made = [ReplicaLoad(i, "prefill", False, 50 - i, tokens, 0.1) for i, tokens in enumerate(prefill)]
    first = len(made)
    return made + [
        ReplicaLoad(first + i, "decode", is_changing, 50 - first - i, 0, use) for i, use in enumerate(decode)
    ]


POLICY = {"max_backlog_tokens": 1000, "max_kv_share": 0.8, "rest_s": 10.0}


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ([1000, 1000], [0.8, 0.8], None),  # at the limits no role is behind
        ([2500, 0], [0.3, 0.4], Switch(3, "prefill")),  # 1,250 on average; the decodes fit on one
        ([2500, 0], [0.5, 0.5], None),  # they would not fit
        ([2500, 0], [0.1], None),  # the last of its role
        ([400, 500], [0.9, 0.8], Switch(1, "decode")),
        ([600, 500], [0.9, 0.8], None),
        ([0], [0.9], None),
        ([3000], [0.9, 0.9], None),  # both are behind
    ],
)
def test_a_pool_that_is_behind_gets_a_replica_that_the_other_can_spare(prefill, decode, expected):
    assert Balance(**POLICY).switch(loads(prefill, decode), 0.0) == expected


def test_after_a_change_there_is_rest():
    policy, behind = Balance(**POLICY), loads([5000], [0.1, 0.1, 0.1])
    assert policy.switch(behind, 5.0) == Switch(3, "prefill")
    assert policy.switch(behind, 14.9) is None
    assert policy.switch(behind, 15.0) == Switch(3, "prefill")


def test_a_replica_that_is_being_drained_is_waited_for():
    assert Balance(**POLICY).switch(loads([5000], [0.1, 0.1], is_changing=True), 0.0) is None


@given(
    prefill=st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    decode=st.lists(st.floats(0, 1), min_size=1, max_size=4),
)
def test_one_of_each_role_is_always_left(prefill, decode):
    before = loads(prefill, decode)
    change = Balance(**POLICY).switch(before, 0.0)
    after = [change.role if change and load.name == change.name else load.role for load in before]
    assert set(after) == {"prefill", "decode"}
    assert change is None or after != [load.role for load in before]


def test_fixed_roles_never_change():
    assert Fixed().interval_s is None
    assert Fixed().switch(loads([10**9], [0.0] * 5), 0.0) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval_s": 0.0}, "interval_s=0.0: must be a finite number > 0 s"),
        ({"max_backlog_tokens": 0}, "max_backlog_tokens=0: must be >= 1 token"),
        ({"max_kv_share": 1.5}, "max_kv_share=1.5: must be a share, > 0 and <= 1"),
        ({"rest_s": -1.0}, "rest_s=-1.0: must be a finite number >= 0 s"),
    ],
)
def test_refuses_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Balance(**settings)
