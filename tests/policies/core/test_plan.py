"""A plan as data: digests tell decisions apart."""

from policies.batching.chunked import Chunked
from policies.core.plan import StepOutcome


def plans_of(core, num_steps):
    for _ in range(num_steps):
        plan = core.plan(0.0)
        yield plan
        core.commit(plan, StepOutcome(), 0.0)


def test_equal_decisions_have_equal_digests(make_core, make_request):
    def digests(num_prompt_tokens=9, **settings):
        core = make_core(batching=Chunked(max_num_batched_tokens=8), **settings)
        core.add(make_request(0, num_prompt_tokens))
        core.add(make_request(1, 3))
        return [plan.digest() for plan in plans_of(core, 4)]

    assert digests() == digests()
    assert digests() == digests(num_blocks=50), "physical ids and free blocks are no decisions"
    assert len(set(digests())) == 4, "every step computes other tokens"
    assert digests(10)[1:] != digests()[1:]


def test_digest_depends_on_the_preempted_requests(make_core, make_request):
    def digest(preempts):
        def script(view, step):
            if view.num_decoding < 3:
                return Chunked().fill(view, step, 0.0)
            if preempts:
                step.preempt(list(view.decoding)[-1])
            for seq in list(view.decoding)[:2]:
                step.decode(seq)

        core = make_core(batching=script)
        for request_id in range(3):
            core.add(make_request(request_id))
        plans = list(plans_of(core, 2))
        return plans[-1]

    one, other = digest(True), digest(False)
    assert one.tokens_by_request == other.tokens_by_request == {0: 1, 1: 1}
    assert one.digest() != other.digest()


def test_plan_counts_tokens_and_samples(make_core, make_request):
    """Budget 8. 0: 5 tokens; 1: 9, of which 3 fit beside it; then 7 beside the decode, which is one short."""
    core = make_core(batching=Chunked(max_num_batched_tokens=8))
    core.add(make_request(0, 5))
    core.add(make_request(1, 11))
    first, second, third = (
        (p.num_decodes, p.num_decode_context_tokens, p.num_tokens, p.num_sampled, p.tokens_by_request)
        for p in plans_of(core, 3)
    )
    assert first == (0, 0, 8, 1, {0: 5, 1: 3})
    assert second == (1, 6, 8, 1, {0: 1, 1: 7})
    assert third == (1, 7, 2, 2, {0: 1, 1: 1})
