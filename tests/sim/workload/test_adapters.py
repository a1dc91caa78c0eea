"""Traffic with LoRA adapters: Zipf shares, independent of the engine, constant within a session."""

from collections import Counter

import pytest

from sim.workload.arrivals import ClosedLoop, Constant, Poisson
from sim.workload.distributions import Fixed, Geometric, Lengths
from sim.workload.modified import WithAdapters
from sim.workload.sessions import Conversation
from sim.workload.synthetic import Synthetic


def synthetic(num_requests=200, arrivals=None):
    lengths = Lengths(prompt_tokens=Fixed(value=10), output_tokens=Fixed(value=5))
    return Synthetic(arrivals=arrivals or Poisson(rate_per_s=2.0), lengths=lengths, num_requests=num_requests)


def names_of(workload, seed=0):
    arrivals = workload.source(seed=seed, max_model_len=4096).arrivals()
    return [arrival.request.adapter for arrival in arrivals]


def test_shares_follow_zipfs_law():
    """Three adapters with exponent 1: 6/11, 3/11, 2/11; 11,000 requests, five standard deviations."""
    counts = Counter(names_of(WithAdapters(of=synthetic(11_000), num=3, zipf=1.0)))
    assert [counts[f"adapter-{i}"] for i in range(3)] == pytest.approx([6000, 3000, 2000], abs=5 * 53)


def test_an_exponent_of_zero_makes_all_alike():
    counts = Counter(names_of(WithAdapters(of=synthetic(10_000), num=4, zipf=0.0)))
    assert all(count == pytest.approx(2500, abs=5 * 44) for count in counts.values())
    assert len(counts) == 4


def test_a_share_of_requests_uses_the_model_as_it_is():
    names = names_of(WithAdapters(of=synthetic(10_000), num=10, base_share=0.3))
    assert names.count(None) == pytest.approx(3000, abs=5 * 46)
    assert names_of(WithAdapters(of=synthetic(20), base_share=1.0)) == [None] * 20


def test_ranks_take_turns():
    adapters = WithAdapters(of=synthetic(), num=5, ranks=(8, 64)).adapters
    assert [adapter.rank for adapter in adapters] == [8, 64, 8, 64, 8]


def test_everything_else_is_the_other_workloads():
    plain, mixed = synthetic(), WithAdapters(of=synthetic(), num=7)
    one, other = (workload.source(seed=3, max_model_len=4096) for workload in (plain, mixed))
    assert other.num_requests == one.num_requests == 200
    for arrival, with_adapter in zip(one.arrivals(), other.arrivals(), strict=True):
        assert with_adapter.request.adapter is not None
        plain_request = with_adapter.request._replace(adapter=None)
        assert with_adapter._replace(request=plain_request) == arrival


def test_another_seed_draws_others_and_the_same_seed_the_same():
    workload = WithAdapters(of=synthetic(), num=7)
    assert names_of(workload) == names_of(workload) != names_of(workload, seed=1)


def test_which_adapter_does_not_depend_on_the_order_in_which_answers_end():
    """A user of a closed loop is a session and has one adapter, in whichever order requests are served."""
    loop = ClosedLoop(num_users=9, think_time_s=Fixed(value=1.0))
    workload = WithAdapters(of=synthetic(30, loop), num=50)

    def names(order):
        source = workload.source(seed=0, max_model_len=4096)
        running = [arrival.request for arrival in source.arrivals()]
        found = {request.session_id: request.adapter for request in running}
        for turn in range(12):
            request = running.pop(order(turn) % len(running))
            (arrival,) = source.follow_ups(request, 10.0 + turn, 5)
            running.append(arrival.request)
            assert found[arrival.request.session_id] == arrival.request.adapter
        return found

    first_in, last_in = names(lambda turn: 0), names(lambda turn: -1)
    assert first_in == last_in
    assert len(set(first_in.values())) > 3


def test_a_conversation_keeps_its_adapter():
    conversation = Conversation(
        arrivals=Constant(rate_per_s=1.0),
        turns=Geometric(mean=4.0),
        message_tokens=Fixed(value=10),
        answer_tokens=Fixed(value=5),
        think_time_s=Fixed(value=1.0),
        num_conversations=20,
        num_system_prompts=0,
        system_prompt_tokens=Fixed(value=1),
        system_prompt_skew=0.0,
    )
    source = WithAdapters(of=conversation, num=20, zipf=0.0).source(seed=0, max_model_len=4096)
    first = [arrival.request for arrival in source.arrivals()]
    assert len({request.adapter for request in first}) > 5
    num_later = 0
    for request in first:
        mine = request.adapter
        while following := source.follow_ups(request, 100.0, 5):
            request = following[0].request
            assert request.adapter == mine
            num_later += 1
    assert num_later > 20


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num": 0}, "num=0: must be >= 1"),
        ({"zipf": -1.0}, "zipf=-1.0: must be a finite number >= 0"),
        ({"ranks": ()}, r"ranks=\[\]: must have at least one rank"),
        ({"ranks": (8, 0)}, r"ranks=\[8, 0\]: must have at least one rank, each >= 1"),
        ({"base_share": 1.5}, "base_share=1.5: must be a share"),
        ({"of": WithAdapters(of=synthetic())}, "of: must be a workload without adapters of its own"),
    ],
)
def test_settings_are_refused_with_key_value_and_rule(wrong, message):
    with pytest.raises(ValueError, match=message):
        WithAdapters(**({"of": synthetic()} | wrong))
