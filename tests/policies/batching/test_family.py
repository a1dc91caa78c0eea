"""Promises of every batching policy that can run an engine alone, for any requests."""

from functools import partialmethod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.batching.inflight import InFlight
from policies.batching.paced_prefills import PacedPrefills
from policies.batching.partial_prefills import PartialPrefills
from policies.batching.prefill_delayer import PrefillDelayer
from policies.batching.sglang import Sglang
from policies.batching.slots import Slots
from policies.batching.splitfuse import SplitFuse
from policies.batching.static import Dynamic, OneAtATime, Static
from policies.batching.tgi import Tgi
from policies.batching.whole_prompts import Orca, PrefillFirst
from policies.core.plan import StepOutcome

BUDGET = 8
BY_NAME = {
    "chunked": Chunked(max_num_batched_tokens=BUDGET),
    "chunked, threshold": Chunked(max_num_batched_tokens=BUDGET, long_prefill_token_threshold=3),
    "chunked, whole": Chunked(max_num_batched_tokens=BUDGET, enable_chunked_prefill=False),
    "chunked, first chunks": Chunked(
        max_num_batched_tokens=BUDGET, max_num_active_seqs=5, scheduler_reserve_full_isl=False
    ),
    "prefill_delayer": PrefillDelayer(max_num_batched_tokens=BUDGET, num_ranks=2, max_delay_passes=3),
    "paced_prefills": PacedPrefills(max_num_batched_tokens=BUDGET, prefill_schedule_interval=3),
    "paced_prefills, threshold": PacedPrefills(max_num_batched_tokens=BUDGET, long_prefill_token_threshold=3),
    "partial_prefills": PartialPrefills(max_num_batched_tokens=BUDGET, long_prefill_token_threshold=4),
    "prefill_first": PrefillFirst(max_num_batched_tokens=BUDGET),
    "one_at_a_time": OneAtATime(max_num_batched_tokens=BUDGET),
    "static": Static(batch_size=3, max_num_batched_tokens=BUDGET),
    "dynamic": Dynamic(batch_size=3, max_queue_delay_s=5.0, max_num_batched_tokens=BUDGET),
    "orca": Orca(batch_size=3),
    "tgi": Tgi(max_batch_prefill_tokens=BUDGET, waiting_served_ratio=1.2, max_waiting_tokens=4),
    "tgi, reserving": Tgi(max_batch_prefill_tokens=BUDGET, max_batch_total_tokens=60),
    "sglang": Sglang(max_num_batched_tokens=BUDGET, max_prefill_tokens=12),
    "sglang, whole": Sglang(enable_chunked_prefill=False, max_prefill_tokens=12),
    "sglang, mixed": Sglang(max_num_batched_tokens=BUDGET, mixed_chunk=True, schedule_conservativeness=0.1),
    "splitfuse": SplitFuse(max_num_batched_tokens=BUDGET),
    "inflight": InFlight(max_num_batched_tokens=BUDGET),
    "inflight, whole": InFlight(max_num_batched_tokens=BUDGET, enable_chunked_context=False),
    "inflight, max_utilization": InFlight(
        max_num_batched_tokens=BUDGET, capacity_scheduler_policy="max_utilization"
    ),
    "inflight, waiting": InFlight(
        max_num_batched_tokens=BUDGET, batch_wait_timeout_iters=3, batch_wait_max_tokens_ratio=0.9
    ),
    "inflight, waiting for room": InFlight(
        max_num_batched_tokens=BUDGET,
        capacity_scheduler_policy="max_utilization",
        batch_wait_timeout_iters=3,
        batch_wait_max_tokens_ratio=0.9,
    ),
    "inflight, turns": InFlight(
        max_num_batched_tokens=BUDGET,
        capacity_scheduler_policy="max_utilization",
        context_chunking_policy="equal_progress",
    ),
    "inflight, static": InFlight(max_num_batched_tokens=BUDGET, capacity_scheduler_policy="static_batch"),
    "slots": Slots(n_parallel=3, n_batch=BUDGET),
}
every_policy = pytest.mark.parametrize("name", BY_NAME)
requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=12
)
sizes = st.tuples(st.sampled_from([1, 4, 7]), st.integers(13, 20))


def run_core(core, make_request, asked, leap):
    """Runs iterations of 1 s to the end; returns (tokens by request, admitted, preempted) of each."""
    coming = sorted((arrival, i, prompt, answer) for i, (prompt, answer, arrival) in enumerate(asked))
    decision_log, now = [], 0
    while coming or core.num_unfinished:
        while coming and coming[0][0] <= now:
            arrival, request_id, prompt, answer = coming.pop(0)
            core.add(make_request(request_id, prompt, float(arrival), max_tokens=answer + 3), answer)
        plan = core.plan(float(now))
        if plan is None:
            now = min([core.wake_s, *(ask[0] for ask in coming)])
            continue
        num_iterations = plan.horizon if leap else 1
        if coming:
            num_iterations = min(num_iterations, int(coming[0][0] - now) or 1)
        decision_log.append(
            (
                plan.tokens_by_request,
                [seq.request_id for seq in plan.admitted],
                [seq.request_id for seq in plan.preempted],
                plan.num_decodes,
            )
        )
        decision_log += [(plan.tokens_by_request, [], [], plan.num_decodes)] * (num_iterations - 1)
        core.commit(plan, StepOutcome(num_iterations), float(now + num_iterations))
        core.check_integrity()
        now += num_iterations
        assert len(decision_log) < 20_000, "a request starves"
    return decision_log


def make(name, make_core, size):
    block_size, num_blocks = size
    num_blocks = max(num_blocks, -(-64 // block_size))
    return make_core(
        batching=type(BY_NAME[name])(**settings_of(BY_NAME[name])),
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=5,
        max_model_len=60,
    )


def settings_of(policy):
    names = [name for name in policy.__dataclass_fields__ if not name.startswith("_")]
    return {name: getattr(policy, name) for name in names}


@every_policy
@given(asked=requests, size=sizes)
def test_leap_equals_step_and_every_request_ends(make_core, make_request, name, asked, size):
    leapt = run_core(make(name, make_core, size), make_request, asked, leap=True)
    assert leapt == run_core(make(name, make_core, size), make_request, asked, leap=False)
    admitted = {request_id for step in leapt for request_id in step[1]}
    assert admitted == set(range(len(asked)))


@every_policy
@given(asked=requests, size=sizes)
def test_the_budget_is_kept(make_core, make_request, name, asked, size):
    """Orca has none, and neither has SGLang without chunks; TGI's is for prompts."""
    for tokens, _, _, num_decodes in run_core(make(name, make_core, size), make_request, asked, leap=True):
        if name.startswith("tgi"):
            assert sum(tokens.values()) - num_decodes <= BUDGET
            assert not num_decodes or len(tokens) == num_decodes, "prompts and decodes are kept apart"
        elif name not in ("orca", "sglang, whole"):
            assert sum(tokens.values()) <= BUDGET


@every_policy
@given(asked=requests, size=sizes)
def test_requests_begin_in_the_order_of_their_arrival(make_core, make_request, name, asked, size):
    """Short prompts pass long ones only under the policies that are made for it."""
    begun = []
    for _, admitted, _, _ in run_core(make(name, make_core, size), make_request, asked, leap=True):
        begun += [request_id for request_id in admitted if request_id not in begun]
    if name != "partial_prefills" and not name.startswith("inflight"):  # short prompts may overtake
        assert begun == sorted(begun, key=lambda request_id: (asked[request_id][2], request_id))


@pytest.mark.parametrize("name", ["inflight", "inflight, whole", "inflight, static", "one_at_a_time"])
@given(asked=requests, size=sizes)
def test_policies_that_reserve_or_run_one_at_a_time_never_preempt(make_core, make_request, name, asked, size):
    decision_log = run_core(make(name, make_core, size), make_request, asked, leap=True)
    assert not any(preempted for _, _, preempted, _ in decision_log)


class Asked:
    """A policy that is asked for every step."""

    def __init__(self, policy):
        self.policy = policy

    def fill(self, view, step, now):
        self.policy.fill(view, step, now)


class Watched:
    """An engine that logs the horizon of each of its plans."""

    def __init__(self, core):
        self.core, self.horizons = core, []

    def __getattr__(self, name):
        return getattr(self.core, name)

    def plan(self, now):
        plan = self.core.plan(now)
        self.horizons.append(plan and (plan.horizon, plan.until_s, plan.num_decode_context_tokens))
        return plan


@pytest.mark.parametrize("name", [name for name in BY_NAME if hasattr(BY_NAME[name], "max_unasked_decodes")])
@given(asked=requests, size=sizes, leap=st.booleans())
def test_a_step_left_to_the_core_is_what_the_policy_decides(make_core, make_request, name, asked, size, leap):
    def run_with(policy):
        core = Watched(make_core(batching=policy, num_blocks=-(-64 // 4) + size[1], max_num_seqs=5))
        return run_core(core, make_request, asked, leap), core.horizons

    assert run_with(BY_NAME[name]) == run_with(Asked(BY_NAME[name]))


class Wrapping:
    """A policy that delegates everything, `max_unasked_decodes` included, but counts its steps."""

    def __init__(self, policy):
        self.policy, self.num_steps = policy, 0

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def __deepcopy__(self, memo):
        return self

    def fill(self, view, step, now):
        self.num_steps += 1
        self.policy.fill(view, step, now)


class Overriding(Chunked):
    """A policy with its own `fill` and the declaration of its base class."""

    __slots__ = ()
    num_steps = 0

    def fill(self, view, step, now):
        type(self).num_steps += 1
        Chunked.fill(self, view, step, now)


class Generated(Overriding):
    """A policy with its own `fill`, which is no plain function, and the declaration of its base class."""

    __slots__ = ()
    fill = partialmethod(Overriding.fill)


@pytest.mark.parametrize(
    "policy", [Wrapping(Chunked()), Overriding(), Generated()], ids=["wrapper", "subclass", "partialmethod"]
)
def test_a_declaration_does_not_hold_for_a_fill_that_it_was_not_made_for(make_core, make_request, policy):
    core = make_core(batching=policy)
    core.add(make_request(0), 8)
    now, before = 0.0, policy.num_steps
    while (plan := core.plan(now)) is not None:
        now += 1.0
        core.commit(plan, StepOutcome(), now)
    assert policy.num_steps - before == 8, "each of the eight tokens is a step that fill decides"
