"""Conversations: prompts that grow by earlier turns, shared beginnings, an end at the context limit."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from policies.core.request import Segment
from sim.workload.arrivals import AllAtOnce, Constant
from sim.workload.distributions import Exponential, Fixed, Geometric, Uniform
from sim.workload.sessions import Conversation


def make_conversation(**settings):
    given = {
        "arrivals": Constant(rate_per_s=1.0),
        "turns": Fixed(value=3),
        "message_tokens": Fixed(value=10),
        "answer_tokens": Fixed(value=20),
        "think_time_s": Fixed(value=5.0),
        "system_prompt_tokens": Fixed(value=100),
        "num_conversations": 1,
    }
    return Conversation(**(given | settings))


def varied(**settings):
    return make_conversation(
        turns=Geometric(mean=4.0),
        message_tokens=Uniform(low=1, high=50),
        answer_tokens=Uniform(low=1, high=80),
        think_time_s=Exponential(mean=3.0),
        **settings,
    )


def run(source, service_s=lambda request: 1.0):
    """Plays a source to its end; returns every arrival. Each request takes service_s(request)."""
    sent, pending = [], list(source.arrivals())
    while pending:
        first = min(pending, key=lambda a: a.request.arrival_s + service_s(a.request))
        pending.remove(first)
        sent.append(first)
        end_s = first.request.arrival_s + service_s(first.request)
        pending += source.follow_ups(first.request, end_s, first.num_output_tokens)
    return sent


def test_each_prompt_is_all_that_was_said_before():
    """System prompt 100 tokens, messages 10, answers 20; 1 s of service, 5 s of thinking."""
    sent = [arrival.request for arrival in run(make_conversation().source(seed=0, max_model_len=4096))]
    assert [request.arrival_s for request in sent] == [0.0, 6.0, 12.0]
    assert [request.prompt.num_tokens for request in sent] == [110, 140, 170]
    assert sent[2].prompt.segments == (
        Segment(0, 100),
        Segment(1, 10),
        Segment(2, 20),
        Segment(3, 10),
        Segment(4, 20),
        Segment(5, 10),
    )
    assert {request.session_id for request in sent} == {0}
    assert [request.request_id for request in sent] == [0, 1, 2]


def test_the_next_turn_quotes_the_answer_by_the_name_that_the_engine_knew():
    source = make_conversation().source(seed=0, max_model_len=100_000)
    requests = [arrival.request for arrival in run(source)]
    by_session = {}
    for request in requests:
        by_session.setdefault(request.session_id, []).append(request)
    turns = [pair for said in by_session.values() for pair in pairwise(said)]
    assert turns
    assert all(later.prompt.segments[-2].content_id == earlier.answer_id for earlier, later in turns)
    assert len({request.answer_id for request in requests}) == len(requests)


def test_an_answer_cut_short_is_remembered_as_it_was_given():
    source = make_conversation().source(seed=0, max_model_len=4096)
    first = next(source.arrivals())
    (second,) = source.follow_ups(first.request, 3.0, 7)
    assert second.request.prompt.segments[2] == Segment(2, 7)
    assert second.request.arrival_s == 8.0


def test_a_refused_turn_ends_the_conversation():
    source = make_conversation().source(seed=0, max_model_len=4096)
    assert not source.follow_ups(next(source.arrivals()).request, 3.0, 0)


def test_a_full_context_ends_the_conversation_and_is_counted():
    source = make_conversation().source(seed=0, max_model_len=189)  # turn 2 needs 170 + 20
    assert source.num_requests == 2
    assert len(run(source)) == 2
    assert source.notes.num_conversations_cut == 1
    enough = make_conversation().source(seed=0, max_model_len=190)
    assert len(run(enough)) == enough.num_requests == 3
    assert enough.notes.num_conversations_cut == 0


def test_rejects_a_context_in_which_no_first_turn_fits():
    with pytest.raises(
        ValueError, match="max_model_len=129: must be larger; the first turn of no conversation fits"
    ):
        make_conversation().source(seed=0, max_model_len=129)


def test_first_turns_that_do_not_fit_are_skipped_and_counted():
    workload = make_conversation(message_tokens=Uniform(low=10, high=200), num_conversations=50)
    source = workload.source(seed=0, max_model_len=200)
    started = {arrival.request.session_id for arrival in run(source)}
    (skipped,) = source.notes.skipped.values()
    assert 0 < len(started) < 50
    assert len(started) + skipped == 50


def test_content_ids_are_shared_by_the_system_prompt_alone():
    workload = varied(num_conversations=300, num_system_prompts=3)
    sent = run(workload.source(seed=0, max_model_len=100_000))
    lengths, owners = {}, {}
    for arrival in sent:
        for place, segment in enumerate(arrival.request.prompt.segments):
            assert lengths.setdefault(segment.content_id, segment.num_tokens) == segment.num_tokens
            owners.setdefault(segment.content_id, set()).add(arrival.request.session_id)
            assert (segment.content_id < 3) == (place == 0)
    assert all(len(sessions) == 1 for content_id, sessions in owners.items() if content_id >= 3)


def test_system_prompts_are_chosen_by_zipf_weights():
    workload = make_conversation(num_conversations=4000, num_system_prompts=3, turns=Fixed(value=1))
    counts = np.zeros(3)
    for seed in range(10):
        source = workload.source(seed=seed, max_model_len=999)
        counts += np.bincount([a.request.prompt.segments[0].content_id for a in source.arrivals()])
    assert stats.chisquare(counts, 40_000 * np.array([6, 3, 2]) / 11).pvalue > 0.01


def test_without_system_prompts_a_prompt_begins_with_the_message():
    sent = run(make_conversation(num_system_prompts=0).source(seed=0, max_model_len=4096))
    assert [arrival.request.prompt.num_tokens for arrival in sent] == [10, 40, 70]
    assert sent[0].request.prompt.segments == (Segment(0, 10),)


@given(st.integers(0, 1000), st.integers(150, 1500))
def test_conversations_do_not_depend_on_the_order_of_service(seed, max_model_len):
    workload = varied(num_conversations=20, num_system_prompts=2)

    def said(service_s):
        source = workload.source(seed=seed, max_model_len=max_model_len)
        sent = run(source, service_s)
        assert len(sent) == source.num_requests
        assert all(a.request.prompt.num_tokens + a.num_output_tokens <= max_model_len for a in sent)
        return sorted(
            (
                a.request.session_id,
                a.request.prompt.num_tokens,
                a.request.prompt.segments,
                a.num_output_tokens,
            )
            for a in sent
        )

    assert said(lambda request: 0.1) == said(lambda request: 50.0 - 2 * request.session_id)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_conversations": None}, "num_conversations=null, duration_s=null: at least one must be set"),
        ({"turns": Fixed(value=0)}, "turns.value=0: must be >= 1 and <= 10,000 turns"),
        ({"turns": Geometric(mean=1e300)}, r"turns.mean=1e\+300: must be >= 1 and <= 10,000 turns"),
        ({"answer_tokens": Fixed(value=0.2)}, "answer_tokens.value=0.2: must be >= 1 and"),
        ({"message_tokens": Fixed(value=2e9)}, "message_tokens.value=2000000000: must be >= 1 and"),
        ({"system_prompt_tokens": Fixed(value=0)}, "system_prompt_tokens.value=0: must be >= 1 and"),
        ({"num_conversations": 0}, "num_conversations=0: must be finite and > 0"),
        ({"num_system_prompts": -1}, "num_system_prompts=-1: must be finite and >= 0"),
    ],
)
def test_rejects_settings_that_describe_no_conversation(given, message):
    with pytest.raises(ValueError, match=message):
        make_conversation(**given)


def test_all_at_once_starts_every_conversation_at_zero():
    source = make_conversation(arrivals=AllAtOnce(), num_conversations=3).source(seed=0, max_model_len=4096)
    assert [arrival.request.arrival_s for arrival in source.arrivals()] == [0.0, 0.0, 0.0]
