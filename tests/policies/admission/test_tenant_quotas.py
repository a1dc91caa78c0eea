"""Quotas of tenants, called directly: decisions by hand and by brute force, and fairness."""

from fractions import Fraction
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from policies.admission.tenant_quotas import TenantQuotas
from tests.policies.admission.asking import ONE, admitted, ask, fleet


def filled_to(uses, weights, limits):
    """Computes the dominant share over weight to which DRF's progressive filling fills tenants, exactly.

    Between two levels at which a tenant is full, what is taken grows linearly.
    """
    shares = {t: max(Fraction(u, c) for u, c in zip(uses[t], limits, strict=True)) for t in uses}
    fulls = {t: shares[t] / weights[t] for t in uses}

    def taken(level, k):
        return sum(min(1, level / fulls[t]) * uses[t][k] for t in uses)

    low = Fraction(0)
    for high in sorted(fulls.values()):
        ks = [k for k, limit in enumerate(limits) if taken(high, k) > limit]
        if ks:
            return min(
                low + (limits[k] - taken(low, k)) * (high - low) / (taken(high, k) - taken(low, k))
                for k in ks
            )
        low = high
    return inf


uses_of_tenants = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4
)


class TestTenantQuotas:
    def test_unused_share_is_lent_and_comes_back(self):
        """Limit 4: alone, a has all; b is let in up to its half nevertheless, and a waits until it has 1."""
        policy = TenantQuotas(max_outstanding=4)
        ofa, ofb = ([ask(100 * k + i, tenant="ab"[k]) for i in range(9)] for k in range(2))
        assert admitted(policy, ofa[:5]) == [True] * 4 + [False]
        assert admitted(policy, ofb[:3]) == [True, True, False]
        for request in ofa[:2]:
            policy.on_end(request, 0.0)
            assert admitted(policy, [ofa[5], ofb[3]]) == [False, False]
        policy.on_end(ofa[2], 0.0)
        assert admitted(policy, [ofa[5], ofb[3]]) == [True, False]

    def test_weights_are_shares(self):
        policy = TenantQuotas(max_outstanding=4, tenant_weights={"a": 3.0})
        assert sum(admitted(policy, [ask(i, tenant="b") for i in range(9)])) == 4
        assert sum(admitted(policy, [ask(10 + i, tenant="a") for i in range(9)])) == 3

    def test_limits_grow_with_the_replicas(self):
        policy = TenantQuotas(max_outstanding=2)
        assert sum(admitted(policy, [ask(i) for i in range(9)], fleet(0, 0, 0))) == 6

    def test_the_dominant_resource_counts(self):
        """12 requests, 1200 tokens; a asks for 10 each, b for 300. Both fill up to 3/4 of what they use
        most, as 9 + 3 are the 12 requests: b is let in up to 3, where halves would be 6 and 2.
        """
        policy = TenantQuotas(max_outstanding=12, max_outstanding_tokens=1200)
        ofa = [ask(i, 10, tenant="a") for i in range(20)]
        ofb = [ask(100 + i, 300, tenant="b") for i in range(20)]
        assert sum(admitted(policy, ofa)) == 12
        assert sum(admitted(policy, ofb)) == 3

    def test_alone_any_prompt_is_let_in_and_beside_others_not(self):
        policy = TenantQuotas(max_outstanding=8, max_outstanding_tokens=100)
        huge = ask(0, 1000)
        assert admitted(policy, [huge, huge]) == [True, False]
        policy.on_end(huge, 0.0)
        assert admitted(policy, [ask(1, 1), huge]) == [True, False]

    def test_nothing_is_left_of_requests_that_have_ended(self, bytes_held):
        policy = TenantQuotas()
        requests = [ask(i, 5, tenant=str(i)) for i in range(50)]
        admitted(policy, requests)
        for request in requests:
            policy.on_end(request, 0.0)
        assert bytes_held(policy) == bytes_held(TenantQuotas())

    @given(
        outstanding=uses_of_tenants,
        tenant=st.sampled_from("abcde"),
        num_tokens=st.integers(1, 9),
        weights=st.dictionaries(st.sampled_from("abcde"), st.sampled_from([0.5, 2.0, 3.0])),
        limits=st.tuples(st.integers(1, 15), st.none() | st.integers(1, 60)),
    )
    def test_progressive_filling_admits_the_same(self, outstanding, tenant, num_tokens, weights, limits):
        """Compared to progressive filling in exact fractions; within its share no tenant is refused."""
        policy = TenantQuotas(
            max_outstanding=limits[0], max_outstanding_tokens=limits[1], tenant_weights=weights
        )
        unlimited = TenantQuotas(max_outstanding=10**6, tenant_weights=weights)
        for of, prompts in outstanding.items():
            for i, num in enumerate(prompts):
                unlimited.refusal(ask(i, num, tenant=of), ONE, 0.0)
        policy._uses, policy._total = unlimited._uses, unlimited._total

        uses = {t: (len(prompts), sum(prompts)) for t, prompts in outstanding.items()}
        before = uses.get(tenant, (0, 0))
        uses[tenant] = (before[0] + 1, before[1] + num_tokens)
        exact_limits = (limits[0], limits[1] or 10**9)
        exact_weights = {t: Fraction(weights.get(t, 1.0)) for t in uses}
        share = max(Fraction(u, c) for u, c in zip(uses[tenant], exact_limits, strict=True))
        would_be = share / exact_weights[tenant] <= filled_to(uses, exact_weights, exact_limits)
        if share <= exact_weights[tenant] / sum(exact_weights.values()):
            assert would_be, "DRF's sharing incentive"
        assert admitted(policy, [ask(99, num_tokens, tenant=tenant)]) == [would_be]

    @given(
        calls=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=120),
        limit=st.integers(3, 12),
    )
    def test_with_one_limit_each_keeps_its_max_min_share(self, calls, limit):
        """Water filling by hand: sort demands, give each the smaller of its demand and an equal part of the
        rest. An admitted tenant has no more than that; the total exceeds the limit by shares at most.
        """
        policy, here, serial = TenantQuotas(max_outstanding=limit), {t: [] for t in "abc"}, 0
        for tenant, ends in calls:
            if ends:
                if here[tenant]:
                    policy.on_end(here[tenant].pop(), 0.0)
                continue
            serial += 1
            request = ask(serial, tenant=tenant)
            demands = {t: len(here[t]) + (t == tenant) for t in here}
            rest, fair = limit, {}
            for place, t in enumerate(sorted(demands, key=demands.get)):
                fair[t] = min(demands[t], rest / (3 - place))
                rest -= fair[t]
            is_let_in = policy.refusal(request, ONE, 0.0) is None
            assert is_let_in == (demands[tenant] <= fair[tenant] + 1e-9)
            if is_let_in:
                here[tenant].append(request)
