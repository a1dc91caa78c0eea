"""Outputs with min_tokens: nothing ends them before, and other requests keep their tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from realengine.serving.model import Model
from realengine.serving.sampling_params import SamplingParams
from realengine.serving.tokenizer import byte_tokenizer
from tests.realengine.serving.async_scenarios import CONFIG, SETTINGS

torch.set_num_threads(1)

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


def prompts(num=6):
    generator = random.Random(3)
    return [[generator.randrange(250) for _ in range(generator.randint(2, 20))] for _ in range(num)]


def make(**settings):
    architecture = Architecture.from_hf(CONFIG)
    model = Model(architecture, None, byte_tokenizer(architecture.vocab_size, architecture.eos_token_ids))
    return LLM(model, **(SETTINGS | settings))


@pytest.fixture(scope="module")
def llm():
    return make()


@pytest.fixture(scope="module")
def free(llm):
    """Returns the greedy tokens of every prompt, without any end."""
    return [output.outputs[0].token_ids for output in llm.generate(prompts(), GREEDY)]


def masked_greedy(llm, prompt, stops, min_tokens):
    """Returns the greedy tokens by their definition: the likeliest allowed token, one request a token."""
    tokens, one = [], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=20)
    while len(tokens) < NUM_TOKENS:
        likely = llm.generate([prompt + tokens], one)[0].outputs[0].logprobs[0].top
        banned = stops if len(tokens) < min_tokens else ()
        tokens.append(next(token for token in likely if token not in banned))
        if tokens[-1] in stops:
            break
    return tuple(tokens)


@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap": True}, {"max_iterations": 3}, {"num_kv_blocks": 9}, {"speculative_config": NGRAM}],
    ids=lambda settings: ",".join(settings) or "plain",
)
def test_stop_tokens_are_not_drawn_before_min_tokens(llm, free, settings):
    stops = [tuple(sorted(set(tokens[:3]))) for tokens in free]
    params = [replace(GREEDY, stop_token_ids=own, min_tokens=5 + i) for i, own in enumerate(stops[:4])]
    others = [GREEDY] * 2
    outputs = make(**settings).generate(prompts(), params + others)
    for prompt, own, each, output in zip(prompts(), stops, params, outputs, strict=False):
        expected = masked_greedy(llm, prompt, own, each.min_tokens)
        assert output.outputs[0].token_ids == expected
        assert len(expected) >= each.min_tokens
    assert [output.outputs[0].token_ids for output in outputs[4:]] == free[4:]


def test_the_end_of_sequence_is_masked_too(llm, free):
    architecture = replace(Architecture.from_hf(CONFIG), eos_token_ids=(free[0][1],))
    model = Model(architecture, None, byte_tokenizer(architecture.vocab_size))
    params = replace(GREEDY, ignore_eos=False)
    short, long = (
        LLM(model, **SETTINGS).generate([prompts()[0]], replace(params, min_tokens=num))[0].outputs[0]
        for num in (0, 6)
    )
    assert (short.token_ids, short.finish_reason) == (free[0][: free[0].index(free[0][1]) + 1], "stop")
    assert len(long.token_ids) > 6 or long.finish_reason == "length"
    assert free[0][1] not in long.token_ids[:6]


def test_a_slot_forgets_the_mask_of_the_request_before(free):
    llm = make(max_num_seqs=1)
    stops = tuple(set(free[0]))
    llm.generate([prompts()[0]], replace(GREEDY, stop_token_ids=stops, min_tokens=NUM_TOKENS))
    penalised = replace(GREEDY, presence_penalty=1e-9)  # is drawn where masks are
    for params in (GREEDY, penalised):
        assert llm.generate([prompts()[0]], params)[0].outputs[0].token_ids == free[0]


def test_other_ways_to_draw_respect_the_mask(llm, free):
    drawn = replace(GREEDY, temperature=1.0, seed=3, repetition_penalty=1.3)
    plain = llm.generate([prompts()[1]], drawn)[0].outputs[0].token_ids
    masked = replace(drawn, stop_token_ids=plain[:1], min_tokens=NUM_TOKENS)
    found = llm.generate([prompts()[1]], masked)[0].outputs[0]
    assert len(found.token_ids) == NUM_TOKENS
    assert plain[0] not in found.token_ids


def test_stop_strings_end_the_output_only_after_min_tokens(llm, free):
    text = llm.generate([prompts()[2]], GREEDY)[0].outputs[0].text
    stop = text[0]
    (first,) = llm.generate([prompts()[2]], replace(GREEDY, stop=(stop,)))[0].outputs
    assert (first.text, first.stop_reason, len(first.token_ids)) == ("", stop, 1)
    (later,) = llm.generate([prompts()[2]], replace(GREEDY, stop=(stop,), min_tokens=4))[0].outputs
    assert len(later.token_ids) > 4
    assert later.text.startswith(stop)
    assert text.startswith(later.text)


@pytest.mark.parametrize("min_tokens", [-1, 1.5, 17])
def test_wrong_numbers_are_refused(min_tokens):
    with pytest.raises(ValueError, match="min_tokens="):
        SamplingParams(min_tokens=min_tokens)


def test_stop_reasons_name_the_token_or_the_string(llm, free):
    token = free[0][2]
    (output,) = llm.generate([prompts()[0]], replace(GREEDY, stop_token_ids=(token,)))[0].outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", token)
    (output,) = llm.generate([prompts()[0]], GREEDY)[0].outputs
    assert (output.finish_reason, output.stop_reason) == ("length", None)


def test_salts_separate_the_cache(llm):
    prompt = list(range(40))
    found = []
    for salt in ("", "a", "b", "a", ""):
        answer = llm.engine.add(prompt, GREEDY, cache_salt=salt)
        llm.engine.run()
        found.append((answer.num_cached_tokens, tuple(answer.outputs[0].tokens)))
    assert [num for num, _ in found] == [0, 0, 0, 32, 32]
    assert len({tokens for _, tokens in found}) == 1
