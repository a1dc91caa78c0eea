"""Requests that have waited for longer than allowed."""

from typing import ClassVar

import pytest

from policies.core.plan import StepOutcome
from policies.scheduling import Overdue
from policies.scheduling.shortest_job import LengthAware, ShortestJobFirst, ShortestRemaining


class FixedPredictions:
    """A predictor of given lengths, by request id."""

    needs_truth: ClassVar[bool] = False

    def __init__(self, *lengths):
        self.lengths = lengths

    def predict(self, request, true_num_tokens):
        return self.lengths[request.request_id]

    def observe(self, request, num_output_tokens):
        pass


def one_step(core, now):
    """Runs one iteration; returns (tokens by request, preempted ids)."""
    plan = core.plan(now)
    decision = plan.tokens_by_request, [seq.request_id for seq in plan.preempted]
    core.commit(plan, StepOutcome(), now)
    core.check_integrity()
    return decision


def waiting(core):
    return [seq.request_id for seq in core.waiting]


def test_the_overdue_go_first_in_the_order_of_their_arrival(make_core, make_request):
    """Shortest first: 3, 1, 2. At 6 s, those that came by 1 s are overdue; at 7 s all are."""
    core = make_core(scheduling=LengthAware(max_wait_s=5.0), max_num_seqs=1)
    core.add(make_request(0), stop_after=99)
    one_step(core, 0.0)
    for request_id, num_tokens, arrival_s in [(1, 20, 1.0), (2, 30, 0.5), (3, 10, 2.0)]:
        core.add(make_request(request_id, num_tokens, arrival_s), stop_after=9)
    one_step(core, 5.0)
    assert waiting(core) == [3, 1, 2]
    one_step(core, 6.0)
    assert waiting(core) == [2, 1, 3]
    assert [seq.rank for seq in core.waiting] == [(0, 0.5), (0, 1.0), (1, 10, 2.0)]
    one_step(core, 7.0)
    assert [seq.rank for seq in core.waiting] == [(0, 0.5), (0, 1.0), (0, 2.0)]


def test_a_request_that_runs_when_its_time_comes_is_overdue_once_it_waits_again(make_core, make_request):
    """Two blocks: 0 and 1 hold one each. 0 needs a second, 1 has the longer answer and must go."""
    policy = ShortestJobFirst(max_wait_s=5.0)
    core = make_core(scheduling=policy, predictor=FixedPredictions(2, 9, 1), num_blocks=2)
    core.add(make_request(0, 4, 0.0), stop_after=2)
    core.add(make_request(1, 4, 0.0), stop_after=9)
    one_step(core, 0.0)
    core.add(make_request(2, 4, 5.0), stop_after=1)
    assert one_step(core, 6.0) == ({0: 1}, [1])
    assert one_step(core, 6.0) == ({1: 5}, []), "before 2, whose answer is shorter"


def test_asking_for_a_rank_again_and_again_sets_one_alarm(make_core, make_request):
    overdue, seq = Overdue(), make_core().add(make_request(0, arrival_s=1.0))
    assert {overdue.rank(seq, 5.0, 7) for _ in range(100)} == {(1, 7, 1.0)}
    assert overdue._alarms.pop_due(5.9) == []
    assert overdue._alarms.pop_due(6.0) == [seq]
    assert overdue._alarms.next_s == float("inf")


@pytest.mark.parametrize(
    ("max_wait_s", "first", "second"),
    [
        (None, ({1: 4}, [0]), ({0: 6}, [])),
        (9.0, ({1: 4}, [0]), ({0: 6}, [])),
        (8.0, ({0: 1}, []), ({0: 1}, [])),
    ],
)
def test_an_answer_as_old_as_max_wait_s_neither_displaces_nor_is_displaced(
    make_core, make_request, max_wait_s, first, second
):
    """One slot. 20 to go against 5, at 8 s: 0, which came at 0 s, gives way unless it is that old."""
    policy = ShortestRemaining(min_gain_tokens=0, max_wait_s=max_wait_s)
    core = make_core(scheduling=policy, predictor=FixedPredictions(22, 5), max_num_seqs=1)
    core.add(make_request(0), stop_after=22)
    one_step(core, 0.0)
    one_step(core, 0.0)
    core.add(make_request(1, arrival_s=8.0), stop_after=1)
    assert [one_step(core, 8.0), one_step(core, 8.0)] == [first, second]


def test_an_overdue_request_waits_for_a_slot_and_then_comes_before_shorter_ones(make_core, make_request):
    """One slot. 1, the longest, is overdue from 5 s on: it waits until 0 has ended."""
    policy = ShortestRemaining(min_gain_tokens=0, max_wait_s=5.0)
    core = make_core(scheduling=policy, predictor=FixedPredictions(50, 99, 2), max_num_seqs=1)
    core.add(make_request(1, arrival_s=0.0), stop_after=9)
    core.add(make_request(0, arrival_s=1.0), stop_after=3)
    assert one_step(core, 4.0) == ({0: 4}, [])
    core.add(make_request(2, arrival_s=4.5), stop_after=2)
    assert one_step(core, 5.0) == ({0: 1}, [])
    assert one_step(core, 5.0) == ({0: 1}, [])
    assert one_step(core, 5.0) == ({1: 4}, [])


def test_a_limit_below_no_time_is_refused():
    assert ShortestRemaining(max_wait_s=None).max_wait_s is None
    assert ShortestRemaining(max_wait_s=0.0).max_wait_s == 0
    for max_wait_s in (-1.0, float("nan")):
        with pytest.raises(
            ValueError, match=f"max_wait_s={max_wait_s}: must be >= 0 s, or null for no limit"
        ):
            ShortestRemaining(max_wait_s=max_wait_s)
