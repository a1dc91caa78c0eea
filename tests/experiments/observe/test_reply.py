"""`windtunnel observe` reads streams: token times are right, however a server cuts its chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from experiments.observe.reply import Reply
from policies.core.request import Prompt, Request
from sim.records.requests import Status


def make_reply() -> Reply:
    return Reply(request=Request(0, 0.0, Prompt(8)), num_asked=4, due_s=0.0, http_status=200)


def event(text: str | None = None, *, usage: int | None = None, **more: Any) -> bytes:
    """Returns a server-sent event of a completion.

    text None: an event without choices, like the last one, which carries the usage.
    """
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": None, **more}]
    chunk: dict[str, Any] = {"choices": choices}
    if usage is not None:
        chunk["usage"] = {"prompt_tokens": 8, "completion_tokens": usage}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def read(*events: tuple[float, bytes]) -> Reply:
    reply = make_reply()
    for now, data in events:
        reply.feed(data, now)
    reply.close(events[-1][0])
    return reply


def test_a_chunk_holds_as_many_tokens_as_the_usage_grew_by():
    reply = read((1.0, event("a", usage=1)), (2.0, event("bcd", usage=4)), (3.0, event("e", usage=5) + DONE))
    assert reply.chunks() == ([1.0, 2.0, 3.0], [1, 3, 1], "usage")
    assert reply.status is Status.finished
    assert reply.num_tokens == 5


def test_an_empty_text_is_a_token_if_the_usage_says_so():
    """Half a character: vLLM sends a chunk without text."""
    reply = read((1.0, event("", usage=1)), (2.0, event("é", usage=2)), (2.5, event(usage=2) + DONE))
    assert reply.chunks().time_s == [1.0, 2.0]


def test_a_chunk_without_a_token_is_not_the_first_token():
    """In chat the role comes first, with a usage of 0."""
    reply = make_reply()
    first = {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": {"completion_tokens": 0}}
    second = {"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 1}}
    reply.feed(b"data: " + json.dumps(first).encode() + b"\n\n", 1.0)
    reply.feed(b"data: " + json.dumps(second).encode() + b"\n\n" + DONE, 2.0)
    reply.close(2.0)
    assert reply.chunks().time_s == [2.0]


def test_a_role_without_usage_is_no_token_either():
    reply = make_reply()
    first = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    second = {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}
    reply.feed(b"data: " + json.dumps(first).encode() + b"\n\n", 1.0)
    reply.feed(b"data: " + json.dumps(second).encode() + b"\n\n", 2.0)
    reply.close(2.0)
    assert reply.chunks() == ([2.0], [1], "chunks")
    assert reply.status is Status.finished


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_hidden_reasoning_is_tokens(field):
    reply = make_reply()
    reply.feed(b"data: " + json.dumps({"choices": [{"delta": {field: "hm"}}]}).encode() + b"\n\n" + DONE, 1.0)
    reply.close(1.0)
    assert reply.num_tokens == 1


def test_without_any_usage_a_visible_chunk_is_a_token():
    reply = read((1.0, event("a")), (2.0, event("")), (3.0, event("b") + DONE))
    assert reply.chunks() == ([1.0, 3.0], [1, 1], "chunks")


def test_invisible_chunks_count_where_only_so_the_total_is_right():
    reply = read((1.0, event("a")), (2.0, event("")), (3.0, event("b")), (3.0, event(usage=3) + DONE))
    assert reply.chunks() == ([1.0, 2.0, 3.0], [1, 1, 1], "chunks")


def test_a_total_that_fits_no_count_of_chunks_is_spread_evenly():
    reply = read(
        (1.0, event("a b")), (2.0, event("c d")), (3.0, event("e f g")), (3.0, event(usage=7) + DONE)
    )
    assert reply.chunks() == ([1.0, 2.0, 3.0], [2, 3, 2], "spread")


def test_token_ids_count_where_there_is_no_usage():
    reply = read((1.0, event("a", token_ids=[5])), (2.0, event("b", token_ids=[6, 7]) + DONE))
    assert reply.chunks() == ([1.0, 2.0], [1, 2], "usage")
    assert reply.token_ids == [5, 6, 7]


def test_events_are_read_wherever_the_bytes_are_cut():
    data = event("ab", usage=1) + b": a comment\r\n\r\n" + event("c", usage=2).replace(b"\n", b"\r\n") + DONE
    for cut in range(len(data)):
        reply = make_reply()
        reply.feed(data[:cut], 1.0)
        reply.feed(data[cut:], 2.0)
        reply.close(2.0)
        assert (reply.text, reply.num_tokens, reply.status) == ("abc", 2, Status.finished), cut


def test_a_stream_that_ends_early_has_failed_and_keeps_its_tokens():
    reply = read((1.0, event("a", usage=1)), (2.0, event("b", usage=2)))
    assert (reply.status, reply.has_failed, reply.num_tokens) == (Status.aborted, True, 2)
    assert reply.error == "the stream ended before the output"


def test_an_error_in_the_stream_is_a_failure_with_its_message():
    error = b'data: {"error": {"message": "engine\\n died", "code": 500}}\n\n'
    reply = read((1.0, event("a", usage=1)), (2.0, error + DONE))
    assert (reply.status, reply.has_failed, reply.http_status) == (Status.aborted, True, 500)
    assert reply.error == "engine died"


def test_an_error_of_the_question_in_the_stream_is_a_refusal():
    """vLLM has answered 200 when it finds a token id out of the vocabulary."""
    reply = read((1.0, b'data: {"error": {"message": "out of vocabulary", "code": 400}}\n\n' + DONE))
    assert (reply.status, reply.has_failed, reply.http_status) == (Status.rejected, False, 400)


def test_an_answer_without_a_token_has_failed():
    assert read((1.0, event(usage=0) + DONE)).error == "the output has no token"


def test_cached_tokens_are_taken_from_the_usage():
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 6}}
    reply = make_reply()
    chunk = {"choices": [{"text": "a"}], "usage": usage}
    reply.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n" + DONE, 1.0)
    assert (reply.prompt_tokens, reply.cached_tokens) == (9, 6)
