"""Orders that look at lengths, deadlines and tenants: hand-computed schedules."""

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.plan import StepOutcome
from policies.scheduling.deadlines import EarliestDeadlineFirst, LeastSlack
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.priority import OnlineBatch, Priority
from policies.scheduling.s3 import S3
from policies.scheduling.shortest_job import LengthAware, ShortestJobFirst, ShortestRemaining
from policies.scheduling.virtual_token_counter import VirtualTokenCounter


class FixedPredictions:
    """A predictor of given lengths, by request id."""

    needs_truth: ClassVar[bool] = False

    def __init__(self, *lengths):
        self.lengths = lengths

    def predict(self, request, true_num_tokens):
        return self.lengths[request.request_id]

    def observe(self, request, num_output_tokens):
        pass


def one_step(core, now=0.0):
    """Runs one iteration; returns (tokens by request, preempted ids)."""
    plan = core.plan(now)
    decision = plan.tokens_by_request, [seq.request_id for seq in plan.preempted]
    core.commit(plan, StepOutcome(), now)
    core.check_integrity()
    return decision


def first_in(core, now=0.0):
    """Returns the ids in the order of their first tokens, one slot at a time."""
    order = []
    while (plan := core.plan(now)) is not None:
        order += [seq.request_id for seq in plan.admitted]
        core.commit(plan, StepOutcome(), now)
    return order


def test_aging_lets_an_old_normal_request_go_before_a_young_urgent_one(make_core, make_request):
    """10 s make up for a class: class 1 at 0 s ranks as class 0 at 10 s."""
    core = make_core(scheduling=Priority(aging_s=10.0), max_num_seqs=1)
    for request_id, arrival_s, priority in [(0, 9.0, 0), (1, 0.0, 1), (2, 11.0, 0), (3, 0.5, 2)]:
        core.add(make_request(request_id, arrival_s=arrival_s, priority=priority), stop_after=1)
    assert first_in(core, 20.0) == [0, 1, 2, 3]


def test_shortest_job_first_goes_by_prediction(make_core, make_request):
    core = make_core(scheduling=ShortestJobFirst(), predictor=FixedPredictions(30, 10, 20), max_num_seqs=1)
    for request_id in range(3):
        core.add(make_request(request_id), stop_after=1)
    assert first_in(core) == [1, 2, 0]


def test_shortest_job_first_lets_the_overdue_go_before_all_others(make_core, make_request):
    core = make_core(
        scheduling=ShortestJobFirst(max_wait_s=5.0), predictor=FixedPredictions(30, 10, 20), max_num_seqs=1
    )
    for request_id in range(3):
        core.add(make_request(request_id, arrival_s=float(request_id)), stop_after=1)
    assert one_step(core, 4.9)[0] == {1: 4}
    assert one_step(core, 5.0)[0] == {0: 4}


def test_a_plan_of_shortest_job_first_holds_until_a_request_is_overdue(make_core, make_request):
    core = make_core(
        scheduling=ShortestJobFirst(max_wait_s=5.0), predictor=FixedPredictions(30, 10), max_num_seqs=1
    )
    core.add(make_request(1, arrival_s=2.0), stop_after=50)
    one_step(core, 2.0)
    core.add(make_request(0, arrival_s=1.0), stop_after=50)
    assert core.plan(2.0).until_s == 6.0


def test_shortest_remaining_lets_a_shorter_one_in(make_core, make_request):
    """One slot. 20 to go against 5: the running one is preempted, and comes back when the other ends."""
    core = make_core(
        scheduling=ShortestRemaining(min_gain_tokens=0), predictor=FixedPredictions(22, 5), max_num_seqs=1
    )
    core.add(make_request(0), stop_after=22)
    one_step(core)
    one_step(core)
    core.add(make_request(1), stop_after=1)
    assert one_step(core) == ({1: 4}, [0])
    assert one_step(core) == ({0: 6}, [])


def test_shortest_remaining_counts_what_is_produced(make_core, make_request):
    """Predicted 22, but 18 of it are there: 4 to go beat 5."""
    core = make_core(
        scheduling=ShortestRemaining(min_gain_tokens=0), predictor=FixedPredictions(22, 5), max_num_seqs=1
    )
    core.add(make_request(0), stop_after=22)
    for _ in range(18):
        one_step(core)
    core.add(make_request(1), stop_after=1)
    assert one_step(core) == ({0: 1}, [])


def test_an_outgrown_prediction_counts_double(make_core, make_request):
    """Predicted 8, and 8 are there: 16 are expected, 8 to go, more than the other's 5.

    The plan before holds just until then: 6 iterations from 2 tokens on.
    """
    core = make_core(
        scheduling=ShortestRemaining(min_gain_tokens=0), predictor=FixedPredictions(8, 5), max_num_seqs=1
    )
    core.add(make_request(0), stop_after=22)
    for _ in range(4):
        one_step(core)
    core.add(make_request(1), stop_after=1)
    plan = core.plan(0.0)
    assert (plan.tokens_by_request, plan.horizon) == ({0: 1}, 4)
    core.commit(plan, StepOutcome(4), 0.0)
    assert one_step(core) == ({1: 4}, [0])


def test_shortest_remaining_does_not_preempt_for_less_than_its_gain(make_core, make_request):
    core = make_core(
        scheduling=ShortestRemaining(min_gain_tokens=17), predictor=FixedPredictions(22, 5), max_num_seqs=1
    )
    core.add(make_request(0), stop_after=22)
    one_step(core)  # 21 to go: 16 more than the other
    core.add(make_request(1), stop_after=1)
    assert one_step(core) == ({0: 1}, [])


def test_no_request_is_preempted_if_that_does_not_make_enough_room(make_core, make_request):
    """5 blocks: the short answer that runs holds 3, the long one 2; the waiting request needs 3."""
    core = make_core(
        scheduling=ShortestRemaining(min_gain_tokens=0), predictor=FixedPredictions(2, 99, 50), num_blocks=5
    )
    core.add(make_request(0, 9), stop_after=9)
    core.add(make_request(1, 5), stop_after=9)
    one_step(core)
    core.add(make_request(2, 9))
    assert one_step(core) == ({0: 1, 1: 1}, [])


@pytest.mark.parametrize(
    ("num_blocks", "admitted"),
    [(15, [0, 1, 2]), (14, [0, 1]), (13, [0, 1]), (12, [0, 2]), (11, [0]), (2, [0])],
)
def test_s3_packs_the_largest_need_that_fits_first(make_core, make_request, num_blocks, admitted):
    """Prompts of 4, answers of 36, 8 and 4: needs of 10, 3 and 2 blocks, never more than there are."""
    core = make_core(scheduling=S3(), predictor=FixedPredictions(36, 8, 4), num_blocks=num_blocks)
    for request_id in range(3):
        core.add(make_request(request_id), stop_after=1)
    if num_blocks == 11:
        admitted = [0]  # 1 block is left
    elif num_blocks in (9, 2):  # a need is never larger than the memory
        admitted = [0]
    assert [seq.request_id for seq in core.plan(0.0).admitted] == admitted


@pytest.mark.parametrize(("num_tokens", "decision"), [(3, {0: 1, 1: 4}), (4, {0: 1})])
def test_s3_doubles_what_an_outgrown_prediction_is_allotted(make_core, make_request, num_tokens, decision):
    """8 blocks. 4 + 4 tokens are 2 blocks; from the 4th token on it is 4 + 8, 3 blocks, and 6 do not fit."""
    core = make_core(scheduling=S3(), predictor=FixedPredictions(4, 20), num_blocks=8)
    core.add(make_request(0), stop_after=30)
    for _ in range(num_tokens):
        one_step(core)
    core.add(make_request(1), stop_after=1)
    assert one_step(core)[0] == decision


def test_edf_goes_by_deadline_and_a_deadline_of_ones_own_counts(make_core, make_request):
    core = make_core(scheduling=EarliestDeadlineFirst(ttft_s=(1.0, 5.0)), max_num_seqs=1)
    core.add(make_request(0, arrival_s=0.0, priority=1), stop_after=1)  # due at 5
    core.add(make_request(1, arrival_s=3.0), stop_after=1)  # 4
    core.add(make_request(2, arrival_s=0.0, priority=7), stop_after=1)  # 5, the last of the table
    core.add(make_request(3, arrival_s=3.5, deadline_s=3.9), stop_after=1)
    assert first_in(core, 4.0) == [3, 1, 0, 2]


def test_least_slack_takes_the_prompt_into_account(make_core, make_request):
    """Both due at 1 s; at 10 tokens/s the prompt of 8 must start 0.4 s before that of 4."""
    core = make_core(scheduling=LeastSlack(ttft_s=(1.0,), prefill_tokens_per_s=10.0), max_num_seqs=1)
    core.add(make_request(0, 4), stop_after=1)
    core.add(make_request(1, 8), stop_after=1)
    assert first_in(core) == [1, 0]


def test_an_answer_ahead_of_its_reader_gives_way_when_slack_is_gone(make_core, make_request):
    """At 10 s a token, 3 tokens at time 0 are due at 31 s. The other must start at 0.9: not before that."""
    policy = LeastSlack(ttft_s=(1.0,), tpot_s=(10.0,), prefill_tokens_per_s=40.0, margin_s=5.0)
    core = make_core(scheduling=policy, max_num_seqs=1)
    core.add(make_request(0), stop_after=50)
    for _ in range(3):
        one_step(core)
    core.add(make_request(1), stop_after=1)
    plan = core.plan(0.5)
    assert (plan.tokens_by_request, plan.until_s) == ({0: 1}, 0.9)
    core.commit(plan, StepOutcome(), 0.9)
    assert one_step(core, 0.9) == ({1: 4}, [0])


def test_online_requests_push_batch_aside_and_batch_takes_what_is_left(make_core, make_request):
    core = make_core(scheduling=OnlineBatch(), max_num_seqs=2)
    core.add(make_request(0, priority=1), stop_after=9)
    core.add(make_request(1, priority=1, arrival_s=1.0), stop_after=9)
    one_step(core)
    core.add(make_request(2, arrival_s=2.0), stop_after=1)
    assert one_step(core) == ({0: 1}, [1])
    assert one_step(core) == ({0: 1, 2: 4}, [])
    assert one_step(core) == ({0: 1, 1: 5}, [])


def test_a_batch_request_near_its_deadline_is_online(make_core, make_request):
    policy = OnlineBatch(promote_before_s=10.0)
    core = make_core(scheduling=policy, max_num_seqs=1)
    core.add(make_request(0, arrival_s=0.0), stop_after=50)
    one_step(core)
    core.add(make_request(1, arrival_s=1.0, deadline_s=100.0), stop_after=1)
    core.add(make_request(2, arrival_s=2.0), stop_after=1)
    assert [seq.request_id for seq in core.waiting] == [2, 1]
    plan = core.plan(50.0)
    assert plan.until_s == 90.0
    core.commit(plan, StepOutcome(), 90.0)
    one_step(core, 90.0)
    assert [seq.request_id for seq in core.waiting] == [1, 2]


@pytest.mark.parametrize(("long_first", "order"), [(False, [1, 2, 0]), (True, [0, 2, 1])])
def test_length_aware_orders_prompts(make_core, make_request, long_first, order):
    core = make_core(scheduling=LengthAware(long_first=long_first), max_num_seqs=1)
    for request_id, num_tokens in enumerate([30, 10, 20]):
        core.add(make_request(request_id, num_tokens), stop_after=1)
    assert first_in(core) == order


@pytest.mark.parametrize(("long_first", "order"), [(False, [1, 0]), (True, [0, 1])])
def test_begun_prefills_come_in_the_order_of_what_is_left(make_core, make_request, long_first, order):
    """Both have begun with 4 tokens; 26 and 6 are left."""
    seen = []

    def fill(view, step):
        seen.append([seq.request_id for seq in view.prefilling])
        for seq in view.prefilling:
            step.prefill(seq, 4)
        for seq in view.waiting:
            step.admit(seq, 4)

    core = make_core(batching=fill, scheduling=LengthAware(long_first=long_first))
    core.add(make_request(0, 30))
    core.add(make_request(1, 10))
    one_step(core)
    one_step(core)
    assert seen == [[], order]


def serve(core, num_iterations):
    """Returns each tenant's service after each iteration: admitted prompt tokens + 2 * output tokens."""
    service, history = {"a": 0, "b": 0}, []
    for _ in range(num_iterations):
        plan = core.plan(0.0)
        for seq in plan.admitted:
            service[seq.request.tenant] += seq.num_prompt_tokens
        for seq in [*plan.decodes, *(chunk.seq for chunk in plan.chunks if chunk.completes)]:
            service[seq.request.tenant] += 2
        core.commit(plan, StepOutcome(), 0.0)
        waiting = {seq.request.tenant for seq in core.waiting}
        if waiting != {"a", "b"}:
            break
        history.append(dict(service))
    return history


def backlogged(make_core, make_request, scheduling, asks, max_num_seqs):
    """Returns a core to which all of tenant a's requests came before all of tenant b's."""
    core = make_core(scheduling=scheduling, max_num_seqs=max_num_seqs, num_blocks=10_000)
    for request_id, (tenant, num_prompt, num_output) in enumerate(sorted(asks)):
        core.add(make_request(request_id, num_prompt, float(request_id), tenant=tenant), num_output)
    return core


asks_of_two_tenants = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(1, 30), st.integers(1, 20)), min_size=20, max_size=60
)


@given(asks=asks_of_two_tenants, max_num_seqs=st.integers(1, 4))
def test_two_backlogged_tenants_differ_in_service_by_a_bound(make_core, make_request, asks, max_num_seqs):
    """|W_a - W_b| <= 2 max(w_p L_input, w_q M), M: max_num_seqs x the most tokens of a sequence."""
    core = backlogged(make_core, make_request, VirtualTokenCounter(), asks, max_num_seqs)
    longest_prompt = max(ask[1] for ask in asks)
    longest = max(ask[1] + ask[2] for ask in asks)
    bound = 2 * max(longest_prompt, 2 * max_num_seqs * longest)
    for service in serve(core, 2000):
        assert abs(service["a"] - service["b"]) <= bound


def test_first_come_first_served_breaks_that_bound(make_core, make_request):
    """40 requests of a, then those of b: 12 tokens in, 6 out, 24 a request; the bound is 2 x 2 x 18 = 72."""
    asks = [("a", 12, 6)] * 40 + [("b", 12, 6)] * 40
    unfair = serve(backlogged(make_core, make_request, Fcfs(), asks, 1), 2000)
    fair = serve(backlogged(make_core, make_request, VirtualTokenCounter(), asks, 1), 2000)
    assert max(service["a"] - service["b"] for service in unfair) > 72
    assert max(abs(service["a"] - service["b"]) for service in fair) == 24
    assert len(fair) > 300


def test_a_tenant_of_weight_three_gets_three_times_the_service(make_core, make_request):
    asks = [("a", 12, 6)] * 80 + [("b", 12, 6)] * 80
    policy = VirtualTokenCounter(tenant_weights={"b": 3.0})
    last = serve(backlogged(make_core, make_request, policy, asks, 1), 2000)[-1]
    assert last["b"] / last["a"] == pytest.approx(3, rel=0.1)


def test_a_tenant_that_was_away_has_earned_no_credit(make_core, make_request):
    """a was served 10 x 24 alone. When b comes, both are level: they alternate, b does not catch up."""
    core = make_core(scheduling=VirtualTokenCounter(), max_num_seqs=1)
    for request_id in range(20):
        core.add(make_request(request_id, 12, float(request_id), tenant="a"), 6)
    for _ in range(60):
        one_step(core)
    for request_id in range(20, 40):
        core.add(make_request(request_id, 12, float(request_id), tenant="b"), 6)
    tenants = [("a" if request_id < 20 else "b") for request_id in first_in(core)][:8]
    assert sorted(tenants[:2]) == sorted(tenants[2:4]) == sorted(tenants[4:6]) == ["a", "b"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShortestJobFirst(max_wait_s=-1.0), "max_wait_s=-1.0: must be >= 0 s"),
        (lambda: ShortestRemaining(min_gain_tokens=-1), "min_gain_tokens=-1: must be >= 0"),
        (lambda: S3(window=0), "window=0: must be >= 1"),
        (lambda: EarliestDeadlineFirst(ttft_s=()), "ttft_s=..: must not be empty"),
        (lambda: LeastSlack(tpot_s=(0.1, 0.0)), "tpot_s.1.=0.0: must be > 0 s"),
        (lambda: LeastSlack(prefill_tokens_per_s=0.0), "prefill_tokens_per_s=0.0: must be > 0"),
        (lambda: VirtualTokenCounter(input_weight=-1.0), "input_weight=-1.0: must be >= 0"),
        (lambda: VirtualTokenCounter(tenant_weights={"a": 0.0}), "tenant_weights.a=0.0: must be > 0"),
        (lambda: OnlineBatch(promote_before_s=-1.0), "promote_before_s=-1.0: must be >= 0 s"),
        (lambda: LengthAware(max_wait_s=-1.0), "max_wait_s=-1.0: must be >= 0 s"),
        (lambda: Priority(aging_s=0.0), "aging_s=0.0: must be > 0 s"),
        (lambda: Fcfs(preemption_mode="drop"), "preemption_mode=drop: must be one of recompute, swap"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
