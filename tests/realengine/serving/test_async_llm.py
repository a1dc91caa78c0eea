"""The asynchronous engine: the tokens of the offline one, streamed; errors; settings."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from realengine.serving.sampling_params import SamplingParams
from realengine.serving.tokenizer import Tokenizer
from tests.realengine.serving.async_scenarios import (
    ALL,
    GREEDY,
    LONG,
    collect,
    last,
    make,
    prompts,
    run_scenario,
    stepwise,
    until,
)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer():
    """Returns a tokenizer with one token per byte, so that random tokens are also partial characters."""
    tokenizers = pytest.importorskip("tokenizers", reason="text needs the package tokenizers")
    vocab = {letter: i for i, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(bytes_only, eos_token_ids=(259,))


@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap": True, "max_iterations": 3}, {"num_kv_blocks": 9}, {"max_waiting": 1}],
    ids=lambda settings: ",".join(settings) or "plain",
)
def test_many_at_once_get_the_tokens_of_the_offline_engine(settings, expected):
    async def scenario(llm):
        return await asyncio.gather(*(last(llm, prompt) for prompt in prompts()))

    outputs = run_scenario(scenario, **settings)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in prompts()]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_cumulative_outputs_grow_and_deltas_join_to_them(expected):
    async def scenario(llm):
        steps = stepwise(llm)

        async def collect_each():
            outputs = []
            async for output in llm.generate(prompts()[2], GREEDY):
                outputs.append(output)
                steps.release(ALL if output.finished else 1)
            return outputs

        others = (collect(llm, prompts()[2], output_kind=kind) for kind in ("delta", "final_only"))
        return await asyncio.gather(collect_each(), *others)

    cumulative, deltas, final = run_scenario(scenario)
    tokens = [output.outputs[0].token_ids for output in cumulative]
    assert tokens == [expected[2][:length] for length in range(1, 13)]
    assert sum((output.outputs[0].token_ids for output in deltas), ()) == expected[2]
    assert all(output.outputs[0].token_ids for output in deltas)
    assert [output.outputs[0].token_ids for output in final] == [expected[2]]
    for outputs in (cumulative, deltas, final):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_text_streams_whole_characters_and_is_the_text_of_the_tokens(tokenizer):
    async def scenario(llm):
        llm.tokenizer = tokenizer
        sampled = SamplingParams(max_tokens=100, ignore_eos=True, seed=4)
        return await asyncio.gather(
            *(collect(llm, "Grüße", sampled, output_kind=kind) for kind in ("cumulative", "delta"))
        )

    cumulative, deltas = run_scenario(scenario)
    tokens = cumulative[-1].outputs[0].token_ids
    text = tokenizer.decode([token for token in tokens if token != 259])
    assert len(set(text)) > 10
    assert cumulative[-1].outputs[0].text == text
    assert "".join(output.outputs[0].text for output in deltas) == text
    assert cumulative[-1].prompt == "Grüße"
    assert cumulative[-1].prompt_token_ids == tuple(tokenizer.encode("Grüße"))


def test_every_answer_of_a_request_has_its_own_tokens_and_logprobs(offline):
    params = SamplingParams(n=3, max_tokens=9, ignore_eos=True, seed=2, logprobs=2)
    (truth,) = offline.generate([prompts()[1]], params)

    async def scenario(llm):
        return await asyncio.gather(
            *(collect(llm, prompts()[1], params, output_kind=kind) for kind in ("cumulative", "delta"))
        )

    cumulative, deltas = run_scenario(scenario)
    assert [output.index for output in cumulative[-1].outputs] == [0, 1, 2]
    assert len({output.token_ids for output in truth.outputs}) == 3
    for index, answer in enumerate(truth.outputs):
        answer_output = cumulative[-1].outputs[index]
        assert answer_output.token_ids == answer.token_ids
        assert [one.logprob for one in answer_output.logprobs] == pytest.approx(
            [one.logprob for one in answer.logprobs], abs=1e-4
        )
        parts = [output.outputs[index] for output in deltas]
        assert sum((part.token_ids for part in parts), ()) == answer.token_ids
        logprobs = sum((part.logprobs for part in parts), ())  # computed beside other requests than the first
        assert [one.logprob for one in logprobs] == pytest.approx(
            [one.logprob for one in answer.logprobs], abs=1e-4
        )
        assert all(len(part.logprobs) == len(part.token_ids) for part in parts)


def test_a_bad_request_raises_its_own_error_while_others_go_on(expected):
    async def scenario(llm):
        bad = [[3, 260], [], [1] * 128, ["a"], "text"]
        asked = [last(llm, prompt) for prompt in [prompts()[0], *bad, prompts()[1]]]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, *errors, other = run_scenario(scenario)
    assert [str(error) for error in errors[:3]] == [
        "prompt token 1 is 260: must be >= 0 and < 260",
        "an empty prompt",
        "prompt of 128 tokens: max_model_len is 128",
    ]
    assert [type(error) for error in errors] == [ValueError] * 5
    assert "no tokenizer; give token ids" in str(errors[4])
    assert [output.outputs[0].token_ids for output in (first, other)] == expected[:2]


def test_an_id_is_served_once_at_a_time():
    async def scenario(llm):
        running, steps = llm.generate(prompts()[0], LONG, request_id="a"), stepwise(llm)
        await anext(running)
        with pytest.raises(ValueError, match="request_id=a: is in use by an unfinished request"):
            await last(llm, prompts()[1], request_id="a")
        steps.release(ALL)
        numbered = await asyncio.gather(last(llm, prompts()[1]), last(llm, prompts()[2]))
        await running.aclose()
        await until(lambda: llm.num_unfinished == 0)
        return numbered, await last(llm, prompts()[1], request_id="a")

    numbered, again = run_scenario(scenario)
    assert len({output.request_id for output in numbered}) == 2
    assert again.request_id == "a"


def test_what_fails_on_the_device_ends_with_an_output_that_says_so(expected):
    async def scenario(llm):
        runner = llm.engine.runner
        launch, num_launches = runner.launch, 0

        def failing(plan, num_iterations=1):
            nonlocal num_launches
            num_launches += 1
            if num_launches == 4:
                raise RuntimeError("out of memory")
            return launch(plan, num_iterations)

        runner.launch = failing
        return await collect(llm, prompts()[0]), await last(llm, prompts()[1])

    outputs, other = run_scenario(scenario)
    assert outputs[-1].error == "out of memory"
    assert outputs[-1].outputs[0].finish_reason == "error"
    assert outputs[-1].outputs[0].token_ids == expected[0][:3]
    assert other.outputs[0].token_ids == expected[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_waiting": 0}, "max_waiting=0: must be >= 1"),
        ({"on_full": "drop"}, "on_full=drop: must be one of wait, reject"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be >= 1"),
    ],
)
def test_rejects_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_rejects_an_unknown_output_kind():
    async def scenario(llm):
        with pytest.raises(
            ValueError, match="output_kind=text: must be one of cumulative, delta, final_only"
        ):
            await last(llm, prompts()[0], output_kind="text")

    run_scenario(scenario)
