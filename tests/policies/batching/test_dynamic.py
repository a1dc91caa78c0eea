"""Dynamic batches: which requests wait for a fuller batch, and for how long."""

from math import inf, nan

import pytest

from policies.batching.static import Dynamic
from policies.core.plan import StepOutcome

A, B, C, D = range(4)


def test_a_dynamic_batch_starts_when_its_oldest_request_has_waited(make_core, make_request):
    """A comes at 0, B at 0.5 and does not begin the delay anew."""
    core = make_core(batching=Dynamic(batch_size=3, max_queue_delay_s=1.0))
    core.add(make_request(A, arrival_s=0.0), stop_after=2)
    assert core.plan(0.0) is None
    assert core.wake_s == 1.0
    core.add(make_request(B, arrival_s=0.5), stop_after=1)
    assert core.plan(0.5) is None
    assert core.wake_s == 1.0
    plan = core.plan(1.0)
    assert plan.tokens_by_request == {A: 4, B: 4}
    core.commit(plan, StepOutcome(), 1.1)
    core.add(make_request(C, arrival_s=1.1), stop_after=1)
    plan = core.plan(1.1)
    assert plan.tokens_by_request == {A: 1}, "the batch is closed"
    core.commit(plan, StepOutcome(), 1.2)
    assert core.plan(1.2) is None
    assert core.wake_s == 2.1


def test_a_full_dynamic_batch_starts_at_once(make_core, make_request):
    core = make_core(batching=Dynamic(batch_size=3, max_queue_delay_s=1.0))
    for request_id in (A, B, C, D):
        core.add(make_request(request_id))
    assert core.plan(0.0).tokens_by_request == {A: 4, B: 4, C: 4}


def test_a_dynamic_batch_does_not_wait_for_more_requests_than_there_are_slots(make_core, make_request):
    core = make_core(batching=Dynamic(batch_size=8, max_queue_delay_s=1.0), max_num_seqs=2)
    core.add(make_request(A))
    core.add(make_request(B))
    assert core.plan(0.0).tokens_by_request == {A: 4, B: 4}


def test_a_dynamic_batch_without_a_delay_is_a_static_one(make_core, make_request):
    core = make_core(batching=Dynamic(batch_size=8, max_queue_delay_s=0.0))
    core.add(make_request(A))
    assert core.plan(0.0).tokens_by_request == {A: 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_queue_delay_s": -0.5}, "max_queue_delay_s=-0.5: must be a finite number >= 0 s"),
        ({"max_queue_delay_s": inf}, "max_queue_delay_s=inf: must be a finite number >= 0 s"),
        ({"max_queue_delay_s": nan}, "max_queue_delay_s=nan: must be a finite number >= 0 s"),
        (
            {"batch_size": 1, "max_queue_delay_s": 0.1},
            "max_queue_delay_s=0.1 with batch_size=1: .* set batch_size above 1",
        ),
        ({"batch_size": 0}, "batch_size=0: must be >= 1"),
    ],
)
def test_rejects_a_window_that_is_none(settings, message):
    with pytest.raises(ValueError, match=message):
        Dynamic(**settings)
