"""Sampled tokens, several answers per prompt, penalties, logprobs and ends of answers."""

import re
from dataclasses import replace

import pytest
import torch

from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from realengine.serving.sampling_params import SamplingParams
from realengine.weights.load import load_weights
from tests.realengine.eager import eager_logits
from tests.realengine.small_models import GREEDY, assert_drawn, make, prompts, tokens_of

torch.set_num_threads(1)


def test_sampled_tokens_depend_on_seed_and_place_alone():
    params = [SamplingParams(max_tokens=9, ignore_eos=True, seed=seed, top_k=20) for seed in range(12)]
    alone = [make().generate([prompt], one)[0] for prompt, one in zip(prompts(), params, strict=True)]
    together = make(num_kv_blocks=9, overlap=True, max_iterations=4).generate(prompts(), params)
    assert tokens_of(together) == tokens_of(alone)
    others = make().generate(prompts(), [replace(one, seed=one.seed + 50) for one in params])
    assert sum(a != b for a, b in zip(tokens_of(others), tokens_of(alone), strict=True)) > 9


@pytest.mark.parametrize("num_kv_blocks", [200, 8])
def test_answers_to_one_prompt_share_its_kv_and_are_drawn_each_by_itself(num_kv_blocks):
    params = SamplingParams(n=3, max_tokens=9, ignore_eos=True, seed=5, repetition_penalty=1.2)
    llm = make(num_kv_blocks=num_kv_blocks, overlap=True)
    outputs = llm.generate(prompts(), params)
    assert (llm.engine.core.num_preemptions > 0) == (num_kv_blocks == 8)
    llm.engine.core.check_integrity()
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert len({one.token_ids for one in output.outputs}) == 3
        for one in output.outputs:  # each is the likeliest continuation's sibling: its KV was its own
            assert_drawn(prompt, one.token_ids, params, one.index)


def test_of_several_answers_each_ends_by_itself():
    params = SamplingParams(n=4, max_tokens=30, seed=2, stop_token_ids=tuple(range(12)))
    llm = make(overlap=True)
    (output,) = llm.generate([prompts()[1]], params)
    lengths = {len(one.token_ids) for one in output.outputs}
    assert len(lengths) > 1
    for one in output.outputs:
        assert one.finish_reason == "stop"
        assert one.token_ids[-1] < 12
        assert min(one.token_ids[:-1], default=12) >= 12
        assert_drawn(prompts()[1], one.token_ids, params, one.index)
    # Some end by a token at the very step at which the others reach their limit.
    first = min(lengths)
    (cut,) = llm.generate([prompts()[1]], replace(params, max_tokens=first))
    assert {one.finish_reason for one in cut.outputs} == {"stop", "length"}
    assert [one.token_ids for one in cut.outputs] == [one.token_ids[:first] for one in output.outputs]
    llm.engine.core.check_integrity()


def test_penalties_survive_a_preemption():
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.7, frequency_penalty=0.4
    )
    calm = make().generate(prompts(), params)
    tight = make(num_kv_blocks=9)
    assert tokens_of(tight.generate(prompts(), params)) == tokens_of(calm)
    assert tight.engine.core.num_preemptions > 0
    assert tokens_of(calm) != tokens_of(make().generate(prompts(), GREEDY))


def test_logprobs_are_the_eager_model_s():
    llm = make()
    weights = load_weights(None, llm.architecture, torch.float32, "cpu", seed=1)
    prompt = prompts()[1]
    asked, silent = replace(GREEDY, logprobs=3), GREEDY
    output, other = llm.generate([prompt, prompts()[2]], [asked, silent])
    assert other.outputs[0].logprobs is None
    tokens = [*prompt, *output.outputs[0].token_ids]
    truth = eager_logits(llm.architecture, weights, torch.tensor(tokens)).log_softmax(-1)
    for place, logprob in enumerate(output.outputs[0].logprobs):
        row = truth[len(prompt) + place - 1]
        assert logprob.logprob == pytest.approx(float(row[tokens[len(prompt) + place]]), abs=1e-4)
        top = row.topk(3)
        assert list(logprob.top) == top.indices.tolist()
        assert list(logprob.top.values()) == pytest.approx(top.values.tolist(), abs=1e-4)
    assert len(output.outputs[0].logprobs) == 12


def test_an_end_token_ends_an_answer_and_is_its_last():
    llm = make()
    (free,) = llm.generate([prompts()[1]], GREEDY)
    third = free.outputs[0].token_ids[2]
    stopping = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(third,))
    (output,) = llm.generate([prompts()[1]], stopping)
    first = free.outputs[0].token_ids.index(third)
    assert output.outputs[0].token_ids == free.outputs[0].token_ids[: first + 1]
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1 << 64}, "seed=18446744073709551616: must be a whole number of 64 bits"),
        ({"seed": 1.5}, "seed=1.5: must be"),
        ({"top_k": 1 << 31}, "top_k=2147483648: must be a whole number"),
        ({"temperature": float("inf")}, "temperature=inf: must be"),
        ({"frequency_penalty": "x"}, "frequency_penalty='x': must be a number"),
        ({"max_tokens": 1.5}, "max_tokens=1.5: must be a whole number"),
        ({"n": 2.0}, "n=2.0: must be a whole number"),
        ({"n": 10**9}, "n=1000000000: must be a whole number >= 1 and <= 1024"),
        ({"stop_token_ids": 3}, "stop_token_ids=3: must be a sequence of token ids"),
        ({"stop": ""}, "stop='': must be a sequence of strings"),
        ({"logprobs": 101}, "logprobs=101: must be a whole number >= 0 and <= 100"),
    ],
)
def test_sampling_params_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**settings)


def test_every_seed_of_64_bits_draws():
    seeds = [SamplingParams(max_tokens=3, seed=seed) for seed in (-(1 << 63), -1, 0, (1 << 64) - 1)]
    outputs = make().generate([prompts()[1]] * 4, seeds)
    assert all(output.error is None for output in outputs)
    assert outputs[1].outputs[0].token_ids == outputs[3].outputs[0].token_ids  # the same 64 bits


def test_each_gets_as_many_logprobs_as_it_asked_for():
    llm = make()
    asked = [replace(GREEDY, logprobs=num) for num in (1, 5, 0)]
    outputs = llm.generate([prompts()[1]] * 3, asked)
    assert [len(output.outputs[0].logprobs[3].top) for output in outputs] == [1, 5, 0]
    assert outputs[0].outputs[0].logprobs[3].top.items() <= outputs[1].outputs[0].logprobs[3].top.items()
    too_many, fine = llm.generate([prompts()[1]] * 2, [replace(GREEDY, logprobs=98), GREEDY])
    assert too_many.error == "logprobs=98: must be <= 97, the size of the vocabulary"
    assert fine.error is None


@pytest.mark.parametrize("caching", [PrefixCaching(block_size=4), Radix(block_size=4)])
def test_logprobs_behind_a_hit_are_those_without(caching):
    llm = make(caching=caching)
    params = replace(GREEDY, logprobs=5)
    (cold,), (warm,) = llm.generate([prompts()[4]], params), llm.generate([prompts()[4]], params)
    for before, after in zip(cold.outputs[0].logprobs, warm.outputs[0].logprobs, strict=True):
        assert list(before.top) == list(after.top)
        assert list(before.top.values()) == pytest.approx(list(after.top.values()), abs=1e-5)
