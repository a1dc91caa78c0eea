"""Admission policies, called directly: decisions by hand and by brute force, and bounds that always hold."""

from math import inf
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.admission import AdmitAll
from policies.admission.deadline_feasible import DeadlineFeasible
from policies.admission.queue_bound import Outstanding, QueueBound
from policies.admission.tenant_quotas import TenantQuotas
from policies.admission.token_bucket import TokenBucket
from policies.core.request import Branching
from tests.policies.admission.asking import ONE, admitted, ask, fleet


def test_none_admits_every_request():
    assert all(admitted(AdmitAll(), [ask(i, 10**6) for i in range(1000)]))


def test_counts_follow_requests_from_door_to_door():
    counts = Outstanding()
    first, second = ask(0, 10), ask(1, 30)
    for request in (first, second):
        counts.admit(request)
    counts.first_token(first)
    assert (counts.num_requests, counts.num_tokens, counts.num_queued_tokens) == (2, 40, 30)
    counts.end(second)  # without a token
    assert (counts.num_requests, counts.num_tokens, counts.num_queued_tokens) == (1, 10, 0)
    counts.end(first)
    assert counts == Outstanding()


class TestTokenBucket:
    def test_a_burst_then_the_rate(self):
        """Burst 3 at 2 a second: three at once, the fourth half a second later, two more after a second."""
        policy = TokenBucket(rate_per_s=2, burst=3)
        assert admitted(policy, [ask(i) for i in range(4)]) == [True, True, True, False]
        assert policy.refusal(ask(), ONE, 0.0).retry_after_s == 0.5
        assert policy.refusal(ask(), ONE, 0.25).retry_after_s == 0.25
        assert policy.refusal(ask(), ONE, 0.5) is None
        assert admitted(policy, [ask(i) for i in range(3)], now=1.5) == [True, True, False]
        assert admitted(policy, [ask(i) for i in range(4)], now=100.0) == [True, True, True, False]

    def test_tokens_are_those_of_the_prompt_and_max_tokens_of_each_answer(self):
        policy = TokenBucket(rate_per_s=10, burst=100, count="tokens")
        assert policy.refusal(ask(0, 40, max_tokens=20, branching=Branching(2)), ONE, 0.0) is None
        assert policy.refusal(ask(1, 21), ONE, 0.0).retry_after_s == pytest.approx(0.1)
        assert policy.refusal(ask(2, 20), ONE, 0.0) is None

    def test_more_tokens_than_the_burst_are_never_let_in(self):
        policy = TokenBucket(rate_per_s=10, burst=100, count="tokens")
        assert policy.refusal(ask(0, 101), ONE, 1e9).retry_after_s == inf
        assert policy.refusal(ask(0, 100), ONE, 1e9) is None

    def test_a_bucket_for_each_tenant(self):
        policy = TokenBucket(rate_per_s=1, burst=1, per="tenant")
        requests = [ask(tenant="a"), ask(tenant="b"), ask(tenant="a")]
        assert admitted(policy, requests) == [True, True, False]
        assert admitted(TokenBucket(rate_per_s=1, burst=1), requests) == [True, False, False]

    def test_tenants_that_came_once_are_forgotten(self, bytes_held):
        policy, fresh = (TokenBucket(rate_per_s=1, burst=1, per="tenant") for _ in range(2))
        for i in range(1000):
            policy.refusal(ask(tenant=str(i)), ONE, 0.0)
        for i in range(1000):
            policy.refusal(ask(tenant="regular"), ONE, 10.0 + i)
        fresh.refusal(ask(tenant="regular"), ONE, 1009.0)
        assert bytes_held(policy) == bytes_held(fresh)

    @given(
        rate_per_s=st.sampled_from([0.1, 1.0, 3.0, 1e4]),
        burst=st.sampled_from([1.0, 7.5, 40.0]),
        comes=st.lists(
            st.tuples(st.sampled_from([0.0, 1e-6, 0.1, 1 / 3, 5.0]), st.integers(1, 12)), max_size=60
        ),
        count=st.sampled_from(["requests", "tokens"]),
    )
    def test_no_window_lets_in_more_than_burst_and_rate(self, rate_per_s, burst, comes, count):
        """A refused request is admitted at the very time that it was told, if no other request comes."""
        policy = TokenBucket(rate_per_s=rate_per_s, burst=burst, count=count)
        let_in, now = [], 0.0
        for i, (gap_s, num_tokens) in enumerate(comes):
            now += gap_s
            cost = num_tokens if count == "tokens" else 1
            refusal = policy.refusal(ask(i, num_tokens), ONE, now)
            if refusal is None:
                let_in.append((now, cost))
            elif cost <= burst:
                assert refusal.retry_after_s > 0
                if i == len(comes) - 1:
                    assert policy.refusal(ask(i, num_tokens), ONE, now + refusal.retry_after_s) is None
            else:
                assert refusal.retry_after_s == inf
        for i, (start_s, _) in enumerate(let_in):
            for j in range(i, len(let_in)):
                total = sum(cost for _, cost in let_in[i : j + 1])
                assert total <= (burst + rate_per_s * (let_in[j][0] - start_s)) * (1 + 1e-9)

    @given(now=st.floats(0, 1e7), rate_per_s=st.floats(1e-3, 1e6), cost=st.integers(1, 1000))
    @example(now=1e7, rate_per_s=7e5, cost=1000)
    def test_the_retry_time_is_late_enough_whatever_rounding_does(self, now, rate_per_s, cost):
        policy = TokenBucket(rate_per_s=rate_per_s, burst=1000, count="tokens")
        policy.refusal(ask(0, 1000), ONE, now)
        wait_s = policy.refusal(ask(1, cost), ONE, now).retry_after_s
        assert wait_s == pytest.approx(cost / rate_per_s, abs=1e-8)
        assert policy.refusal(ask(1, cost), ONE, now + wait_s) is None


class TestQueueBound:
    def test_the_fleet_holds_no_more_than_the_bound_until_some_end(self):
        policy = QueueBound(max_outstanding=2, per="fleet", retry_after_s=5.0)
        views = fleet(0, 0, 0)
        requests = [ask(i) for i in range(4)]
        assert admitted(policy, requests, views) == [True, True, False, False]
        assert policy.refusal(requests[2], views, 0.0).retry_after_s == 5.0
        policy.on_end(requests[0], 1.0)
        assert admitted(policy, requests[2:], views) == [True, False]

    def test_tokens_may_go_beyond_by_one_prompt_and_alone_any_is_let_in(self):
        policy = QueueBound(max_outstanding=100, count="tokens", per="fleet")
        requests = [ask(0, 99), ask(1, 500), ask(2, 1)]
        assert admitted(policy, requests) == [True, True, False]
        for request in requests[:2]:
            policy.on_end(request, 0.0)
        assert policy.refusal(ask(3, 10**6), ONE, 0.0) is None

    def test_queued_tokens_are_those_without_a_first_token(self):
        policy = QueueBound(max_outstanding=100, count="queued_tokens", per="fleet")
        requests = [ask(0, 100), ask(1, 1)]
        assert admitted(policy, requests) == [True, False]
        policy.on_first_token(requests[0], 0.0)
        assert policy.refusal(requests[1], ONE, 0.0) is None

    @pytest.mark.parametrize(
        ("count", "name"),
        [
            ("requests", "num_outstanding"),
            ("tokens", "num_outstanding_tokens"),
            ("queued_tokens", "num_queued_tokens"),
        ],
    )
    def test_one_replica_with_room_is_enough(self, count, name):
        policy = QueueBound(max_outstanding=5, count=count)
        for counts, is_let_in in [((5, 4, 9), True), ((5, 5, 9), False), ((0,), True), ((5,), False)]:
            views = [SimpleNamespace(**{name: value}) for value in counts]
            assert admitted(policy, [ask()], views) == [is_let_in]

    def test_replicas_are_read_from_the_one_that_had_room(self):
        """300 full ones are walked once; then the one with room is found at the first look."""
        looks = []

        class View:
            def __init__(self, index):
                self.index = index

            @property
            def num_outstanding(self):
                looks.append(self.index)
                return 0 if self.index == 299 else 9

        policy, views = QueueBound(max_outstanding=9), [View(i) for i in range(300)]
        policy.refusal(ask(0), views, 0.0)
        assert len(looks) == 300
        policy.refusal(ask(1), views, 0.0)
        assert looks[300:] == [299]


class TestDeadlineFeasible:
    def test_refused_is_whose_first_token_would_come_too_late(self):
        """At 100 tokens a second and replica, two replicas: 60 + 60 tokens in front are 0.6 s for each, so a
        prompt of 40 has its token at 1.0 s, one of 50 at 1.1 s, 0.1 s late.
        """
        policy = DeadlineFeasible(ttft_s=(1.0,), initial_tokens_per_s=100)
        two = fleet(0, 0)
        assert admitted(policy, [ask(0, 60), ask(1, 60)], two) == [True, True]
        assert policy.refusal(ask(2, 50), two, 0.0).retry_after_s == pytest.approx(0.1)
        assert policy.refusal(ask(3, 40), two, 0.0) is None

    def test_a_request_like_it_that_comes_at_the_retry_time_is_admitted(self):
        policy = DeadlineFeasible(ttft_s=(1.0,), initial_tokens_per_s=100, safety=2.0)
        policy.refusal(ask(0, 80), ONE, 0.0)
        wait_s = policy.refusal(ask(1, 10), ONE, 0.0).retry_after_s
        assert wait_s == pytest.approx(0.4)  # by when 40 of the 80 are done: (40 + 10) / 100 * 2 = 1.0

    def test_targets_are_by_priority_and_a_deadline_of_its_own_goes_first(self):
        policy = DeadlineFeasible(ttft_s=(1.0, 9.0), tpot_s=0.1, initial_tokens_per_s=100)
        policy.refusal(ask(0, 300), ONE, 0.0)
        requests = [
            ask(1, 1),
            ask(2, 1, deadline_s=5.0, max_tokens=21),  # due at 2.9 s, expected at 3.01 s
            ask(3, 1, deadline_s=5.0, max_tokens=19),  # due at 3.1 s
            ask(4, 1, priority=7),
        ]
        assert admitted(policy, requests) == [False, False, True, True]

    def test_what_is_overdue_is_never_let_in(self):
        policy = DeadlineFeasible(ttft_s=(1.0,))
        assert policy.refusal(ask(0, 1, arrival_s=2.0), ONE, 3.0) is None
        assert policy.refusal(ask(1, 1, arrival_s=2.0), ONE, 3.5).retry_after_s == inf

    def test_the_rate_is_measured(self):
        """80 tokens in 0.2 s are 400 a second, not 100: 300 more find their first token at 0.75 s."""
        policy = DeadlineFeasible(ttft_s=(1.0,), initial_tokens_per_s=100)
        first, second = ask(0, 80), ask(1, 1, arrival_s=0.2)
        policy.refusal(first, ONE, 0.0)
        policy.on_first_token(first, 0.2)
        assert policy.refusal(second, ONE, 0.2) is None
        assert policy.refusal(ask(2, 300, arrival_s=0.2), ONE, 0.2) is None
        assert policy.refusal(ask(3, 100, arrival_s=0.2), ONE, 0.2) is not None

    def test_a_rate_that_was_bad_once_is_measured_again(self):
        """A first token after 100 s makes 0.1 tokens a second; while no request waits, all are admitted."""
        policy = DeadlineFeasible(ttft_s=(1.0,), initial_tokens_per_s=100)
        request = ask(0, 10)
        policy.refusal(request, ONE, 0.0)
        policy.on_first_token(request, 100.0)
        for i in range(1, 60):
            request = ask(i, 10, arrival_s=100.0 + i)
            assert policy.refusal(request, ONE, 100.0 + i) is None
            assert (policy.refusal(ask(1000 + i, 1, 100.0 + i), ONE, 100.0 + i) is None) is (i > 1)
            if i == 1:
                policy.on_first_token(request, 100.0 + i + 0.001)
                policy.on_end(request, 102.0)

    def test_a_request_that_has_ended_takes_no_room(self):
        policy = DeadlineFeasible(ttft_s=(1.0,), initial_tokens_per_s=100)
        request = ask(0, 90)
        policy.refusal(request, ONE, 0.0)
        assert policy.refusal(ask(1, 20), ONE, 0.0) is not None
        policy.on_end(request, 0.0)
        assert policy.refusal(ask(1, 20), ONE, 0.0) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenBucket(rate_per_s=0), "^rate_per_s=0: must be a finite number > 0 per second"),
        (lambda: TokenBucket(rate_per_s=inf), "^rate_per_s=inf: must be a finite number > 0 per second"),
        (
            lambda: TokenBucket(burst=0.5),
            "^burst=0.5: must be a finite number >= 1, or no request would be admitted",
        ),
        (lambda: TokenBucket(count="bytes"), r"^count=bytes: must be one of requests, tokens$"),
        (lambda: TokenBucket(per="user"), r"^per=user: must be one of service, tenant$"),
        (lambda: QueueBound(max_outstanding=0), r"^max_outstanding=0: must be >= 1"),
        (lambda: QueueBound(count="kv"), r"^count=kv: must be one of requests, tokens, queued_tokens$"),
        (lambda: QueueBound(per="pool"), r"^per=pool: must be one of replica, fleet$"),
        (
            lambda: QueueBound(retry_after_s=-1),
            "^retry_after_s=-1: must be a finite number >= 0 s, or null for none",
        ),
        (lambda: DeadlineFeasible(ttft_s=()), "^ttft_s=..: must not be empty"),
        (lambda: DeadlineFeasible(tpot_s=-1), r"^tpot_s=-1: must be a finite number >= 0 s$"),
        (lambda: DeadlineFeasible(safety=0), r"^safety=0: must be a finite number > 0$"),
        (
            lambda: DeadlineFeasible(initial_tokens_per_s=inf),
            "^initial_tokens_per_s=inf: must be a finite number > 0",
        ),
        (lambda: TenantQuotas(max_outstanding=0), r"^max_outstanding=0: must be >= 1"),
        (lambda: TenantQuotas(max_outstanding_tokens=0), r"^max_outstanding_tokens=0: must be >= 1"),
        (lambda: TenantQuotas(tenant_weights={"a": 0}), "^tenant_weights.a=0: must be a finite number > 0$"),
        (
            lambda: TenantQuotas(retry_after_s=inf),
            "^retry_after_s=inf: must be a finite number >= 0 s, or null for none",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
