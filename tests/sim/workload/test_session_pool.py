"""Sessions in a closed loop: a fixed number at a time, each begun by the end of another."""

from __future__ import annotations

import json

import pytest

from sim.workload.arrivals import ClosedLoop, Poisson
from sim.workload.distributions import Fixed
from sim.workload.sessions import Conversation
from sim.workload.untimed_traces import MooncakeSessions, ShareGptJson
from tests.sim.workload.test_agentic import make as make_agentic
from tests.sim.workload.test_conversation import make_conversation, run, varied
from tests.sim.workload.test_rag import make as make_rag


def at_a_time(sent, end_of):
    """Returns the most sessions that were open at once, by the requests' arrivals and ends."""
    begun, ended = {}, {}
    for arrival in sent:
        session = arrival.request.session_id
        begun.setdefault(session, arrival.request.arrival_s)
        ended[session] = max(ended.get(session, 0.0), end_of(arrival))
    return (
        max(sum(begun[other] <= at_s < ended[other] for other in begun) for at_s in begun.values()),
        begun,
        ended,
    )


def pool(num_users, **settings):
    return ClosedLoop(num_users=num_users, **settings)


def test_a_conversation_begins_when_another_has_ended():
    """Three turns of 1 s with pauses of 5 s: conversations begin every 13 s, on each of two users."""
    workload = make_conversation(arrivals=pool(2), num_conversations=5)
    sent = run(workload.source(seed=0, max_model_len=4096))
    begun = {}
    for arrival in sent:
        begun.setdefault(arrival.request.session_id, arrival.request.arrival_s)
    assert begun == {0: 0.0, 1: 0.0, 2: 13.0, 3: 13.0, 4: 26.0}
    assert len(sent) == 15


def test_users_pause_between_conversations_and_start_over_the_ramp():
    workload = make_conversation(
        arrivals=pool(2, think_time_s=Fixed(value=7.0), ramp_up_s=4.0),
        num_conversations=4,
        turns=Fixed(value=1),
    )
    sent = run(workload.source(seed=0, max_model_len=4096))
    assert [arrival.request.arrival_s for arrival in sent] == [0.0, 2.0, 8.0, 10.0]


@pytest.mark.parametrize("num_users", [1, 3, 8])
def test_there_are_never_more_sessions_than_users(num_users):
    workload = varied(arrivals=pool(num_users), num_conversations=40)
    source = workload.source(seed=3, max_model_len=4096)
    most, begun, ended = at_a_time(run(source), lambda arrival: arrival.request.arrival_s + 1.0)
    assert most == num_users
    assert sorted(begun) == list(range(40))
    after_first = sorted(begun.values())[num_users:]
    assert all(any(abs(begin_s - end_s) < 1e-9 for end_s in ended.values()) for begin_s in after_first)


def test_contents_and_lengths_are_those_of_the_open_loop():
    """What a conversation says depends on its number alone, not on how it began."""
    closed, opened = (
        run(varied(arrivals=arrivals, num_conversations=20).source(seed=1, max_model_len=4096))
        for arrivals in (pool(4), Poisson(rate_per_s=1.0))
    )

    def said(sent):
        return sorted((a.request.session_id, a.request.prompt.num_tokens, a.num_output_tokens) for a in sent)

    assert said(closed) == said(opened)


def test_no_session_begins_after_the_duration():
    workload = make_conversation(arrivals=pool(1), num_conversations=100, duration_s=30.0)
    sent = run(workload.source(seed=0, max_model_len=4096))
    assert {arrival.request.session_id for arrival in sent} == {0, 1, 2}  # begun at 0, 13 and 26 s


def test_a_task_of_agents_ends_with_its_last_branch():
    workload = make_agentic(arrivals=pool(2), num_tasks=12)
    sent = run(workload.source(seed=5, max_model_len=100_000))
    most, begun, _ = at_a_time(sent, lambda arrival: arrival.request.arrival_s + 1.0)
    assert most == 2
    assert sorted(begun) == list(range(12))


def test_rejects_a_closed_loop_without_a_number_of_sessions():
    with pytest.raises(
        ValueError, match="num_conversations=null: must be set with arrivals by a closed loop"
    ):
        make_conversation(arrivals=pool(2), num_conversations=None, duration_s=60.0)
    assert isinstance(make_conversation(arrivals=pool(2)), Conversation)


def test_requests_of_texts_and_documents_are_in_flight_as_many_as_users(tmp_path):
    """As `--max-concurrency` of vLLM's benchmark with ShareGPT: each request is a session of its own."""
    exchange = [{"from": "human", "value": "Why? " * 30}, {"from": "gpt", "value": "So. " * 20}]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"id": str(i), "conversations": exchange} for i in range(7)]))
    of_texts = ShareGptJson(path=file, arrivals=pool(3))
    of_documents = make_rag(arrivals=pool(3), num_requests=7, duration_s=None)
    for workload in (of_texts, of_documents):
        sent = run(workload.source(seed=0, max_model_len=100_000))
        assert sorted(one.request.arrival_s for one in sent) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0]
        assert len({one.request.request_id for one in sent}) == 7


def test_recorded_sessions_begin_by_the_loop_and_not_at_their_timestamps(tmp_path):
    file = tmp_path / "mooncake.jsonl"
    rows = [
        {
            "session_id": name,
            "timestamp": 90_000.0 * i,
            "input_length": 100,
            "output_length": 5,
            "delay": 2000,
        }
        for i, name in enumerate("aabbcc")
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = MooncakeSessions(path=file, arrivals=pool(1)).source(seed=0, max_model_len=100_000)
    assert [one.request.arrival_s for one in run(source)] == [0.0, 3.0, 4.0, 7.0, 8.0, 11.0]
    assert any("by the closed loop" in remark for remark in source.notes.remarks)
