"""Requests as they are sent: prompts, lengths and options that a server takes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs the extra observe: pip install 'windtunnel[observe]'")

from experiments.observe.scripted_server import Script
from sim.settings.errors import ConfigError
from sim.workload.arrivals import Constant
from sim.workload.distributions import Fixed
from sim.workload.sessions import Conversation
from tests.experiments.observe.observing import NUM_QUESTIONS, figures, make_workload, records, run


def test_later_turns_quote_the_servers_answers():
    talk = Conversation(
        arrivals=Constant(rate_per_s=50.0),
        turns=Fixed(value=2),
        message_tokens=Fixed(value=10),
        answer_tokens=Fixed(value=4),
        think_time_s=Fixed(value=0.01),
        system_prompt_tokens=Fixed(value=20),
        num_conversations=3,
    )
    _, server = run(workload=talk)
    prompts = [served.body["prompt"] for served in server.served[NUM_QUESTIONS:]]
    first, second = ([p for p in prompts if len(p) == n] for n in (30, 44))
    assert (len(first), len(second)) == (3, 3)
    assert {tuple(prompt[:20]) for prompt in prompts} == {tuple(first[0][:20])}
    assert {tuple(prompt[30:34]) for prompt in second} == {(7, 7, 7, 7)}  # what the scripted server says
    assert {tuple(p[:30]) for p in second} == {tuple(p) for p in first}


def test_chat_is_sent_words_of_about_the_right_length():
    """The scripted server counts two tokens a word and ten around a message."""
    observed, server = run(api="chat", workload=make_workload(prompt_tokens=110))
    sent = [len(served.body["messages"][0]["content"].split()) for served in server.served[-20:]]
    assert set(sent) == {50}
    table = records(observed).requests
    assert set(table["prompt_tokens"]) == {110}
    assert set(table["output_tokens"]) == {5}
    assert "Prompts are words of 2 tokens each plus 10 tokens of overhead" in observed.probed.notes[0]


def test_a_server_without_token_ids_is_sent_words():
    def script(body: dict[str, Any]) -> Script:
        return (
            Script(status=400, error="prompt: must be text") if isinstance(body["prompt"], list) else Script()
        )

    observed, _ = run(script)
    assert set(records(observed).requests["prompt_tokens"]) == {64}
    with pytest.raises(ConfigError, match=r"the server rejects them \(prompt: must be text"):
        run(script, prompts="token_ids")


def test_a_small_vocabulary_is_found():
    def script(body: dict[str, Any]) -> Script:
        return Script(status=400, error="out of vocabulary") if max(body["prompt"]) >= 500 else Script()

    observed, server = run(script)
    assert max(max(served.body["prompt"]) for served in server.served[-20:]) < 400
    assert "The server has a small vocabulary: token ids from 100 to 399 were sent." in observed.probed.notes


def test_options_that_a_server_refuses_are_not_sent_to_it():
    def script(body: dict[str, Any]) -> Script:
        unknown = {"ignore_eos", "min_tokens"} & body.keys()
        return Script(status=400, error=f"Unrecognized: {min(unknown)}") if unknown else Script()

    observed, server = run(script)
    assert not {"ignore_eos", "min_tokens"} & server.served[-1].body.keys()
    assert observed.probed.notes == (
        "The server does not support min_tokens, ignore_eos: outputs may be shorter than in the workload.",
    )


def test_answers_may_have_their_own_length():
    """Completions end after 16 tokens unless max_tokens is sent: it is what the context leaves."""
    observed, server = run(
        lambda body: Script(gap_s=0.0, tokens_per_chunk=1000),
        make_workload(num_requests=3),
        exact_output=False,
    )
    body = server.served[-1].body
    assert not {"ignore_eos", "min_tokens"} & body.keys()
    assert body["max_tokens"] == 4096 - 64
    assert figures(observed)["tokens"]["off_outputs"] == 0
    observed, server = run(workload=make_workload(max_tokens=5), exact_output=False)
    assert server.served[-1].body["max_tokens"] == 5
    observed, server = run(api="chat", exact_output=False)
    assert "max_tokens" not in server.served[-1].body
    assert set(records(observed).requests["output_tokens"]) == {16}


def test_the_servers_context_limits_the_traffic():
    observed, _ = run(workload=make_workload(num_requests=3, prompt_tokens=5000, output_tokens=3))
    assert observed.probed.max_model_len == 4096
    assert {reply.request.prompt.num_tokens for reply in observed.load.replies} == {4093}
    assert observed.source.notes.num_clipped == 3
