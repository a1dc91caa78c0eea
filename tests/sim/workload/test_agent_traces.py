"""Sessions of coding agents in the formats of Weka and TraceLab: files made to them, every bad value."""

import json

import pytest

from policies.core.request import Segment
from sim.workload.arrivals import ClosedLoop, Constant
from sim.workload.distributions import Fixed
from sim.workload.formats import TraceLabJsonl
from sim.workload.untimed_traces import WekaJsonl
from tests.sim.workload.test_conversation import run


def call(t, tokens, ids, out=5, kind="n"):
    return {"t": t, "type": kind, "model": "m", "in": tokens, "out": out, "hash_ids": ids}


SUBAGENT = {
    "t": 4.0,
    "type": "subagent",
    "agent_id": "a",
    "requests": [call(0.5, 64, [9]), call(6.0, 70, [9])],
}
SESSION = {
    "id": "s1",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [call(0.0, 130, [1, 2]), SUBAGENT, call(7.5, 200, [1, 2, 3], kind="s")],
}


def weka(folder, *sessions, **settings):
    path = folder / "weka.jsonl"
    path.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    return WekaJsonl(**({"path": path, "arrivals": Constant(rate_per_s=0.01)} | settings))


def arrivals_of(workload):
    return list(workload.source(seed=0, max_model_len=10_000).arrivals())


def test_calls_of_a_session_and_its_subagent_come_at_their_times(tmp_path):
    """Times of the subagent before its start count from it: 4 + 0.5 s; 6 s is a time of the session."""
    sent = arrivals_of(weka(tmp_path, SESSION))
    assert [a.at_s for a in sent] == [0.0, 4.5, 6.0, 7.5]
    assert [a.request.prompt.num_tokens for a in sent] == [130, 64, 70, 200]
    assert {a.request.session_id for a in sent} == {0}
    first, last = (sent[i].request.prompt.segments for i in (0, 3))
    assert first == last[:2]
    assert [s.num_tokens for s in last] == [64, 64, 64]


def test_equal_ids_of_two_sessions_are_different_contents_if_the_scope_is_local(tmp_path):
    for scope, num_contents in (("local", 8), ("global", 4)):
        sent = arrivals_of(weka(tmp_path, *[SESSION | {"hash_id_scope": scope}] * 2))
        assert {a.request.session_id for a in sent} == {0, 1}
        assert len({s.content_id for a in sent for s in a.request.prompt.segments}) == num_contents
    assert len(arrivals_of(weka(tmp_path, SESSION, SESSION, max_sessions=1))) == 4


@pytest.mark.parametrize(
    ("session", "message"),
    [
        ({**SESSION, "block_size": 0}, r"weka.jsonl:1:\d+: block_size: expected a whole number of tokens"),
        ({**SESSION, "hash_id_scope": "here"}, r"weka.jsonl:1:\d+: hash_id_scope: expected local or global"),
        ({"id": "s"}, r"weka.jsonl:1:1: no key block_size; expected id, block_size"),
        ({**SESSION, "requests": [call(-1.0, 9, [])]}, r"weka.jsonl:1:\d+: t: expected a number of seconds"),
        ({**SESSION, "requests": [call(0.0, 9, [], kind="x")]}, r"type: expected n, s, or subagent, found x"),
        ({**SESSION, "requests": [call(0.0, 9, [1, 2])]}, r"hash_ids: expected at most 1 ids for 9 tokens"),
        (
            {**SESSION, "requests": [call(0.0, 9, [1], out=0)]},
            r"out: expected a whole number of tokens from 1",
        ),
        (
            {**SESSION, "requests": [{**SUBAGENT, "requests": [SUBAGENT]}]},
            r"type: expected n or s in a subagent, found a subagent in a subagent",
        ),
        ({**SESSION, "requests": []}, r"weka.jsonl:1:1: expected at least one session with requests"),
    ],
)
def test_a_bad_session_is_named_with_file_line_and_column(tmp_path, session, message):
    with pytest.raises(ValueError, match=message):
        arrivals_of(weka(tmp_path, session))


def test_a_closed_loop_begins_a_session_when_another_has_ended(tmp_path):
    """Its calls keep their times after its begin, and their contents."""
    loop = ClosedLoop(num_users=2, think_time_s=Fixed(value=1.0))
    opened = arrivals_of(weka(tmp_path, SESSION, SESSION, SESSION))
    workload = weka(tmp_path, SESSION, SESSION, SESSION, arrivals=loop)
    sent = run(workload.source(seed=0, max_model_len=100_000))

    def offsets(found, session):
        own = [one.request for one in found if one.request.session_id == session]
        return [round(one.arrival_s - own[0].arrival_s, 6) for one in own]

    for session in range(3):
        assert offsets(sent, session) == offsets(opened, session)
    begins = [min(o.request.arrival_s for o in sent if o.request.session_id == s) for s in range(3)]
    last_s = max(o.request.arrival_s for o in sent if o.request.session_id == 0)
    assert begins == [0.0, 0.0, pytest.approx(last_s + 1.0 + 1.0)]  # an answer takes 1 s, the pause 1 s
    assert sorted(str(o.request.prompt) for o in sent) == sorted(str(o.request.prompt) for o in opened)


def at(second):
    return f"2026-01-31T12:00:{second:04.1f}Z"


def round_of(session, sent, total, prefix, out=7, **more):
    events = [
        {"event_type": "user_message", "timestamp": at(sent)},
        {"event_type": "text", "timestamp": at(59)},
    ]
    row = {"session_id": session, "round_index": 0, "input_tokens_total": total, "prefix_tokens": prefix}
    return row | {"newly_append_tokens": total - prefix, "output_tokens": out, "timing_events": events} | more


def tracelab(folder, *rows):
    path = folder / "rounds.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TraceLabJsonl(path=path)


def test_rounds_share_the_blocks_that_the_engine_had_cached(tmp_path):
    """The second round of a: 150 of 300 tokens were cached, two blocks of 64; b shares nothing with a."""
    rows = (round_of("a", 3.5, 300, 150), round_of("b", 2.0, 130, 128), round_of("a", 1.0, 200, 0))
    sent = arrivals_of(tracelab(tmp_path, *rows))
    assert [a.at_s for a in sent] == [0.0, 1.0, 2.5]
    first, other, second = (a.request.prompt.segments for a in sent)
    assert first == (Segment(0, 64), Segment(1, 64), Segment(2, 64))
    assert second[:2] == first[:2]
    assert len({s.content_id for s in (*first, *other, *second)}) == 3 + 2 + 2
    assert sent[2].request.prompt.num_tokens == 300


def test_reasoning_is_output_and_a_round_without_output_is_counted(tmp_path):
    rows = (
        round_of("a", 1.0, 64, 0, out=3, reasoning_output_tokens=4),
        round_of("a", 2.0, 64, 64, out=0),
        round_of("a", 3.0, 64, 64, timing_events=[{"event_type": "text", "timestamp": at(5)}]),
    )
    source = tracelab(tmp_path, *rows).source(seed=0, max_model_len=10_000)
    assert [(a.at_s, a.num_output_tokens) for a in source.arrivals()] == [(0.0, 7), (4.0, 7)]
    assert source.notes.skipped == {"no output tokens": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (round_of("", 1.0, 9, 0), r"rounds.jsonl:1:2: session_id: expected a text, found"),
        (round_of("a", 1.0, 0, 0), r"rounds.jsonl:1:\d+: input_tokens_total: expected a whole number"),
        (
            round_of("a", 1.0, 9, -1),
            r"rounds.jsonl:1:\d+: prefix_tokens: expected a whole number of tokens from 0",
        ),
        (
            round_of("a", 1.0, 9, 0, reasoning_output_tokens="7"),
            r"rounds.jsonl:1:\d+: reasoning_output_tokens: expected a whole number of tokens from 0",
        ),
        (round_of("a", 1.0, 9, 0, timing_events=[]), r"timing_events: expected events with an event_type"),
        (round_of("a", 1.0, 9, 0, timing_events=[{"timestamp": "noon"}]), r"timing_events: .* found .*noon"),
    ],
)
def test_a_bad_round_is_named_with_file_line_and_column(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        arrivals_of(tracelab(tmp_path, row))


def test_a_round_decades_after_the_first_is_refused(tmp_path):
    late = [{"event_type": "user_message", "timestamp": "2096-01-31T12:00:00Z"}]
    rows = (round_of("a", 1.0, 9, 0), round_of("a", 1.0, 9, 0, timing_events=late))
    with pytest.raises(ValueError, match=r"rounds.jsonl:2:1: timing_events: expected times at most 1e\+09 s"):
        arrivals_of(tracelab(tmp_path, *rows))
