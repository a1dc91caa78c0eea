"""Orders of admission and of preemption."""

from policies.scheduling.fcfs import Fcfs
from policies.scheduling.priority import Priority

URGENT, NORMAL = 0, 1


def test_fcfs_admits_in_order_of_arrival_and_then_of_id(make_core, make_request):
    core = make_core(scheduling=Fcfs())
    for request_id, arrival_s in [(3, 2.0), (2, 1.0), (1, 2.0)]:
        core.add(make_request(request_id, arrival_s=arrival_s))
    assert [seq.request_id for seq in core.plan(2.0).admitted] == [2, 1, 3]


def test_a_preempted_request_goes_before_all_that_came_later(make_core, make_request, run_step):
    """Two blocks; 0 and 1 fill one each. 0 needs a second: 1 must go, and comes back before 2."""
    core = make_core(num_blocks=2)
    core.add(make_request(0, 4, arrival_s=0.0), stop_after=2)
    core.add(make_request(1, 4, arrival_s=1.0), stop_after=9)
    run_step(core)
    core.add(make_request(2, 1, arrival_s=2.0))
    assert run_step(core)[0] == {0: 1}
    assert [seq.request_id for seq in core.waiting] == [1, 2]
    assert run_step(core)[0] == {1: 5}


def test_priority_admits_the_smaller_value_first_and_then_by_arrival(make_core, make_request):
    core = make_core(scheduling=Priority())
    for request_id, arrival_s, priority in [(0, 0.0, NORMAL), (1, 2.0, URGENT), (2, 1.0, URGENT)]:
        core.add(make_request(request_id, arrival_s=arrival_s, priority=priority))
    assert [seq.request_id for seq in core.plan(2.0).admitted] == [2, 1, 0]


def test_priority_preempts_the_least_urgent_whenever_it_came(make_core, make_request, run_step):
    """Three blocks. 0 is normal and came first, 1 and 2 are urgent; 1 needs a block before 0 does.

    step  0 (normal)   1 (urgent)   2 (urgent)   blocks
    0     0>1 (1)                                1
    1     1>2 (1)      0>3 (1)      0>1 (1)      3
    2     2>3 (1)      3>4 (1)      1>2 (1)      3
    3     preempted    4>5 (2)      2>3 (1)      3   0 had its token in hand: it does not count
    """
    core = make_core(scheduling=Priority(), num_blocks=3)
    core.add(make_request(0, 1, arrival_s=0.0, priority=NORMAL))
    run_step(core)
    core.add(make_request(1, 3, arrival_s=1.0, priority=URGENT))
    core.add(make_request(2, 1, arrival_s=1.0, priority=URGENT))
    assert run_step(core)[0] == {0: 1, 1: 3, 2: 1}
    assert run_step(core)[0] == {0: 1, 1: 1, 2: 1}
    plan = core.plan(0.0)
    assert plan.tokens_by_request == {1: 1, 2: 1}
    assert [seq.request_id for seq in plan.preempted] == [0]
    assert (plan.num_decodes, plan.num_decode_context_tokens) == (2, 5 + 3)


def test_waiting_urgent_requests_do_not_preempt(make_core, make_request, run_step):
    """Admission never preempts: a full engine makes even the urgent wait."""
    core = make_core(scheduling=Priority(), max_num_seqs=1)
    core.add(make_request(0, priority=NORMAL))
    run_step(core)
    core.add(make_request(1, priority=URGENT))
    assert run_step(core)[0] == {0: 1}
