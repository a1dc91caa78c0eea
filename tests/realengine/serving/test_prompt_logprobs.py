"""Log-probabilities of prompts: those of the model's logits, however the prompt is computed."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch
from safetensors.torch import save_file

from policies.batching.chunked import Chunked
from realengine.model.architecture import Architecture
from realengine.runner.prompt_scores import NOTHING_SCORED, PromptScores
from realengine.serving.async_llm import AsyncLLM
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.weights.load import load_weights
from tests.realengine.checkpoints import LLAMA, random_checkpoint
from tests.realengine.eager import eager_logits

torch.set_num_threads(1)

CONFIG = {**LLAMA, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
VOCAB = CONFIG["vocab_size"]
SETTINGS = {"device": "cpu", "seed": 1, "num_kv_blocks": 60, "max_num_seqs": 4}
WANTED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=3)
PLAIN = replace(WANTED, prompt_logprobs=None)


def prompts():
    """Returns prompts with a common beginning of two blocks, the last one of a single token."""
    generator = random.Random(2)
    common = [generator.randrange(VOCAB) for _ in range(32)]
    lengths = (1, 17, 40, 50)
    return [common + [generator.randrange(VOCAB) for _ in range(length)] for length in lengths] + [[5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a checkpoint of random weights, so small that no token is certain."""
    found = tmp_path_factory.mktemp("saved")
    tensors = {name: tensor * 0.2 for name, tensor in random_checkpoint(CONFIG).items()}
    save_file(tensors, found / "model.safetensors")
    (found / "config.json").write_text(json.dumps(CONFIG))
    return found


@pytest.fixture(scope="module")
def logits(folder):
    """Returns the function that computes the logits of a whole prompt at once, in float64."""
    spec = Architecture.from_path(folder)
    weights = load_weights(folder, spec, torch.float32, torch.device("cpu"))
    return lambda prompt: eager_logits(spec, weights, torch.tensor(prompt))


def check(logits, prompt, found, num_top=3):
    """Compares with the log-softmax of the logits before each token."""
    expected = logits(prompt).log_softmax(-1)
    assert len(found) == len(prompt)
    assert found[0] is None
    for place, (token, each) in enumerate(zip(prompt[1:], found[1:], strict=True)):
        assert each.logprob == pytest.approx(expected[place, token].item(), abs=1e-4)
        values, tokens = expected[place].topk(num_top)
        assert list(each.top.values()) == pytest.approx(values.tolist(), abs=1e-4)
        assert list(each.top) == tokens.tolist()


def test_the_reference_is_that_of_transformers(folder, logits):
    hf = pytest.importorskip("transformers", reason="transformers is not installed")
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([prompts()[3]])).logits[0]
    torch.testing.assert_close(logits(prompts()[3]).float(), theirs, rtol=1e-4, atol=1e-4)


WAYS = {
    "at once": {},
    "a token at a time": {"batching": Chunked(max_num_batched_tokens=4)},
    "chunks of 13": {"batching": Chunked(max_num_batched_tokens=13)},
    "overlapped": {"overlap": True, "batching": Chunked(max_num_batched_tokens=24)},
    "several iterations": {"max_iterations": 3},
    "too little memory": {"num_kv_blocks": 8, "batching": Chunked(max_num_batched_tokens=24)},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "eagle": {},
    "the model itself": {
        "speculative_config": {
            "method": "self_speculative",
            "skipped_layers": [1],
            "num_speculative_tokens": 2,
        },
        "batching": Chunked(max_num_batched_tokens=24),
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_the_whole_prompt(folder, logits, way):
    settings = WAYS[way]
    if way == "eagle":
        small = replace(Architecture.from_path(folder), num_layers=1)
        settings = {"speculative_config": {"method": "eagle", "model": small, "num_speculative_tokens": 2}}
    llm = LLM(folder, **SETTINGS | settings)
    params = [replace(WANTED, prompt_logprobs=num, logprobs=2) for num in (3, 0, 1, 3, 2)]
    outputs = llm.generate(prompts() + prompts(), params + [PLAIN] * 5)
    for prompt, each, output in zip(prompts(), params, outputs, strict=False):
        check(logits, prompt, output.prompt_logprobs, each.prompt_logprobs)
        assert output.num_cached_tokens == 0
    assert [output.prompt_logprobs for output in outputs[5:]] == [None] * 5
    assert [each.outputs[0].token_ids for each in outputs[:5]] == [
        each.outputs[0].token_ids for each in outputs[5:]
    ]


def test_the_cache_is_not_read_but_written(folder, logits):
    """A prompt whose KV is there is computed again; that of a new prompt is there for others."""
    llm = LLM(folder, **SETTINGS)
    first, second = prompts()[2:4]
    new = second[::-1]
    llm.generate([first], PLAIN)
    llm.generate([new], WANTED)
    (scored,) = llm.generate([second], WANTED)
    check(logits, second, scored.prompt_logprobs)
    assert scored.num_cached_tokens == 0
    found = [llm.generate([prompt], PLAIN)[0] for prompt in (first, second, new)]
    assert [output.num_cached_tokens for output in found] == [64, 32, 80]
    assert found[1].outputs[0].token_ids == scored.outputs[0].token_ids


def test_several_outputs_have_those_of_the_one_prompt(folder, logits):
    (output,) = LLM(folder, **SETTINGS).generate([prompts()[2]], replace(WANTED, n=3, temperature=1.0))
    check(logits, prompts()[2], output.prompt_logprobs)
    assert len(output.outputs) == 3


def test_a_request_without_them_scores_nothing(folder, monkeypatch):
    llm = LLM(folder, **SETTINGS)
    works = []
    execute = llm.engine.runner.execute
    monkeypatch.setattr(llm.engine.runner, "execute", lambda work: (works.append(work), execute(work))[1])
    llm.generate([prompts()[0]], PLAIN)
    assert works
    assert all(work.scored is None for work in works)
    llm.generate([prompts()[0]], WANTED)
    assert sum(len(work.scored.rows_P) for work in works if work.scored) == len(prompts()[0]) - 1
    num_before = len(works)
    llm.generate([prompts()[0]], PLAIN)  # in the same slot
    assert all(work.scored is None for work in works[num_before:])
    assert PromptScores().of([], 0, None) is NOTHING_SCORED


def test_a_stream_has_them_from_its_first_output_on(folder, logits):

    async def test():
        async with AsyncLLM(folder, **SETTINGS) as llm:
            stream = llm.generate(prompts()[3], WANTED, output_kind="delta")
            return [output.prompt_logprobs async for output in stream]

    found = asyncio.run(asyncio.wait_for(test(), 60))
    check(logits, prompts()[3], found[0])
    assert found[-1] == found[0]


@pytest.mark.parametrize("number", [-1, 101, True, 1.5])
def test_a_wrong_number_is_refused(number):
    with pytest.raises(
        ValueError, match=r"prompt_logprobs=.*: must be a whole number >= 0 and <= 100, or None"
    ):
        SamplingParams(prompt_logprobs=number)


def test_more_than_the_vocabulary_is_refused(folder):
    (output,) = LLM(folder, **SETTINGS).generate([[1, 2]], replace(WANTED, prompt_logprobs=VOCAB + 1))
    assert output.error == f"prompt_logprobs={VOCAB + 1}: must be <= {VOCAB}, the size of the vocabulary"
