"""Beam search over HTTP gives the results of the engine's own search, with vLLM's fields and refusals."""

import asyncio

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("aiohttp")

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.serve.engine.result import result_of
from realengine.serving.beams import BeamSearchParams
from realengine.serving.llm import LLM
from sim.settings.scenario import build_scenario
from tests.experiments.serve.engine.conftest import SETTINGS, tiny_model
from tests.experiments.serve.engine.test_backend import GREEDY, PARAMS, PATH, prompts
from tests.realengine.adapters import random_adapter

BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 8, "return_token_ids": True}


def searched(offline, prompt, **params):
    """Returns tokens, text and reason of each result of the engine's own search."""
    asked = BeamSearchParams(**({"beam_width": 3, "max_tokens": 8} | params))
    (output,) = offline.beam_search([prompt], asked)
    ends = set(offline.architecture.eos_token_ids)
    return [
        (
            [token for token in each.tokens[len(prompt) :] if token not in ends],
            each.text,
            each.finish_reason,
        )
        for each in output.sequences
    ]


def found_in(choices):
    return [(choice["token_ids"], choice["text"], choice["finish_reason"]) for choice in choices]


def test_choices_are_the_results_of_a_search_the_best_first(engine_served, offline):
    """Temperature and top_p are ignored; other requests are served beside the search."""

    async def test(client):
        body = BEAMS | {"prompt": prompts()[0], "temperature": 1.7, "top_p": 0.3, "seed": 4}
        plain = [client.post(PATH, GREEDY | {"prompt": prompt}) for prompt in prompts()[:3]]
        return await asyncio.gather(client.post(PATH, body), *plain)

    (status, whole), *plain = engine_served(test)
    assert status == 200
    choices = whole["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert found_in(choices) == searched(offline, prompts()[0])
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    assert whole["usage"]["prompt_tokens"] == len(prompts()[0])
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    own = [output.outputs[0].token_ids for output in offline.generate(prompts()[:3], PARAMS)]
    assert [tuple(each["choices"][0]["token_ids"]) for _, each in plain] == own


@pytest.mark.parametrize("length_penalty", [-2.0, 0.0, 3.0])
def test_a_length_penalty_and_ends_of_sequence(engine_served, length_penalty):
    """Most tokens end an output, so that outputs of all lengths are complete."""
    model = tiny_model(eos_token_ids=tuple(range(60, 300)))

    async def test(client):
        body = BEAMS | {"prompt": prompts()[1], "length_penalty": length_penalty}
        return await client.post(PATH, body), await client.post(PATH, body | {"ignore_eos": True})

    (status, whole), (_, ignored) = engine_served(test, model=model)
    assert status == 200
    offline = LLM(model, **SETTINGS)
    assert found_in(whole["choices"]) == searched(offline, prompts()[1], length_penalty=length_penalty)
    stops = [choice["stop_reason"] for choice in whole["choices"] if choice["finish_reason"] == "stop"]
    assert all(60 <= token < 300 for token in stops)
    assert bool(stops) == ("stop" in [choice["finish_reason"] for choice in whole["choices"]])
    assert {choice["finish_reason"] for choice in ignored["choices"]} == {"length"}


def test_several_prompts_chats_and_echo(engine_served, offline):
    messages = [{"role": "user", "content": "Hello"}]

    async def test(client):
        several = await client.post(PATH, BEAMS | {"prompt": prompts()[:2], "n": 2})
        echo = await client.post(PATH, BEAMS | {"prompt": "Hello", "echo": True})
        chat = await client.post("/v1/chat/completions", BEAMS | {"messages": messages})
        return several, echo, chat

    (_, several), (_, echo), (status, chat) = engine_served(test)
    expected = [each for prompt in prompts()[:2] for each in searched(offline, prompt, beam_width=2)]
    assert found_in(several["choices"]) == expected
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["prompt_tokens"] == sum(map(len, prompts()[:2]))
    assert all(choice["text"].startswith("Hello") for choice in echo["choices"])
    assert status == 200
    texts = [choice["message"]["content"] for choice in chat["choices"]]
    assert texts == [text for _, text, _ in searched(offline, offline.tokenizer.apply_chat(messages))]


def test_an_adapter_searches_its_own_outputs(engine_served):
    adapter = random_adapter(tiny_model().architecture, 4, scaling=50.0)

    async def test(client):
        base = await client.post(PATH, BEAMS | {"prompt": prompts()[0]})
        return base, await client.post(PATH, BEAMS | {"prompt": prompts()[0], "model": "a"})

    (_, base), (status, own) = engine_served(test, adapters=["a"], lora_adapters={"a": adapter})
    assert status == 200
    assert found_in(base["choices"]) != found_in(own["choices"])


def test_the_records_of_a_search_are_complete(engine_served):
    async def test(client):
        await client.post(PATH, BEAMS | {"prompt": prompts()[0], "ignore_eos": True})
        assert not client.llm.engine.core.num_unfinished
        return client.recorder

    recorder = engine_served(test)
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    result = result_of(build_scenario(source.compose(["model=random_8m"])), recorder, is_known_machine=False)
    (row,) = result.in_pandas().requests.to_dict("records")
    assert (row["samples"], row["output_tokens"], row["longest_tokens"]) == (3, 24, 8)
    assert recorder.traffic_table()["output_tokens"].tolist() == [8]


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"stream": True}, None, "Streaming is not currently supported with beam search"),
        (
            {"logprobs": 2},
            "logprobs",
            "logprobs: not reported with use_beam_search=true; leave",
        ),
        ({"length_penalty": 21}, "length_penalty", "length_penalty=21: must be >= -20 and <= 20"),
        ({"n": 51}, "n", "use_beam_search with n=51: beam_width=51: must be a whole number >= 1 and <= 50"),
        ({"use_beam_search": "maybe"}, "use_beam_search", "use_beam_search: "),
    ],
)
def test_what_a_search_cannot_do_is_refused(engine_served, more, param, message):
    async def test(client):
        status, found = await client.post(PATH, BEAMS | {"prompt": "Hello"} | more)
        return status, found, await client.post(PATH, BEAMS | {"prompt": "Hello"})

    status, found, (after, _) = engine_served(test)
    assert (status, found["error"]["param"]) == (400, param)
    assert message in found["error"]["message"]
    assert after == 200


def test_an_engine_that_speculates_refuses_a_search(engine_served):
    async def test(client):
        return await client.post(PATH, BEAMS | {"prompt": "Hello"})

    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    status, found = engine_served(test, **drafts)
    assert status == 400
    assert "an engine that speculates serves one answer per request" in found["error"]["message"]
