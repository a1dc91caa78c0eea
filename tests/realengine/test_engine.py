"""The engine against a plain eager model: same tokens whatever the policies do with batches and memory."""

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.batching.dynamic import Dynamic
from policies.batching.prefill_first import PrefillFirst
from policies.batching.splitfuse import SplitFuse
from policies.batching.static import Static
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.scheduling.mlfq import Mlfq
from policies.scheduling.priority import Priority
from realengine.architecture import Architecture
from realengine.llm import LLM
from realengine.sampling_params import SamplingParams
from tests.realengine.eager import eager_logits

torch.set_num_threads(1)

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 96,
}
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "tie_word_embeddings": True,
    "attention_bias": False,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 7}
CONFIGS = {"llama": LLAMA, "qwen3": QWEN3, "qwen2": QWEN2, "mistral": MISTRAL}

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompts(num=6):
    """Lengths from 1 to some blocks; the second half begins as the first does, and goes on otherwise."""
    generator = torch.Generator().manual_seed(3)
    first = [torch.randint(0, 96, (n,), generator=generator).tolist() for n in (1, 15, 33, 16, 40, 7)][:num]
    return first + [[*prompt, 5, 6, 7] for prompt in first]


def make(config="llama", **settings):
    settings = {"device": "cpu", "num_kv_blocks": 200, "max_num_seqs": 8} | settings
    return LLM(Architecture.from_hf(CONFIGS[config]), seed=1, **settings)


def eager_tokens(llm, prompt, num_tokens):
    """Greedy tokens of a model that computes everything anew for each token, without cache or batch."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = eager_logits(llm.architecture, llm.weights, torch.tensor(tokens))
        tokens.append(int(logits[-1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.fixture(scope="module")
def expected():
    """By config: the eager tokens of every prompt."""
    known = {}

    def of(config):
        if config not in known:
            llm = make(config)
            known[config] = [eager_tokens(llm, prompt, 12) for prompt in prompts()]
        return known[config]

    return of


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_mixed_batch_gives_each_the_tokens_of_the_eager_model(config, expected):
    llm = make(config, batching=Chunked(max_num_batched_tokens=24))
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected(config)


@pytest.mark.parametrize(
    "batching",
    [
        Chunked(max_num_batched_tokens=9),
        PrefillFirst(max_num_batched_tokens=32),
        SplitFuse(max_num_batched_tokens=16),
        Static(batch_size=3),
        Dynamic(batch_size=4, max_queue_delay_s=0.01),
    ],
    ids=lambda batching: type(batching).__name__,
)
def test_whatever_the_batches(batching, expected):
    assert tokens_of(make(batching=batching).generate(prompts(), GREEDY)) == expected("llama")


@pytest.mark.parametrize(
    "caching",
    [Paged(block_size=4), PrefixCaching(block_size=4), Radix(block_size=4), Radix(block_size=1)],
    ids=lambda caching: f"{type(caching).__name__}{caching.block_size}",
)
@pytest.mark.parametrize("tokens_of_kv", [800, 100])
def test_whatever_the_cache_also_where_it_is_too_small_for_all(caching, tokens_of_kv, expected):
    llm = make(
        caching=caching,
        num_kv_blocks=tokens_of_kv // caching.block_size,
        batching=Chunked(max_num_batched_tokens=32),
    )
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected("llama")
    llm.engine.core.check_integrity()
    if tokens_of_kv == 100:
        assert llm.engine.core.num_preemptions > 0


@pytest.mark.parametrize("scheduling", [Priority(), Mlfq(quantum_tokens=4, num_levels=3)])
def test_whatever_the_order(scheduling, expected):
    llm = make(scheduling=scheduling, num_kv_blocks=12)
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected("llama")


@pytest.mark.parametrize("caching", [PrefixCaching(block_size=4), Radix(block_size=4)])
def test_the_next_turn_finds_prompt_and_answer_of_the_last(caching):
    llm = make(caching=caching)
    (first,) = llm.generate([prompts()[2]], GREEDY)
    turn = [*first.prompt_token_ids, *first.outputs[0].token_ids, 9, 8]
    found = {}
    answer = llm.engine.add(turn, GREEDY)
    while answer.finish_reason is None:
        llm.engine.step()
        seq = llm.engine.core.find(answer.request_id)
        if seq is not None:
            found["tokens"] = seq.num_found
    assert found["tokens"] == (len(turn) - 3) // 4 * 4  # the last answer token's KV was never computed
    assert tuple(answer.tokens) == eager_tokens(llm, turn, 12)


def test_the_same_tokens_are_drawn_whatever_else_is_in_the_batch():
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
    alone = make().generate([prompts()[1]], params)[0].outputs[0].token_ids
    beside = make(batching=Chunked(max_num_batched_tokens=16)).generate(
        [prompts()[4], prompts()[1], prompts()[2]], params
    )
    assert beside[1].outputs[0].token_ids == alone
    other = SamplingParams(temperature=1.0, top_p=0.9, seed=8, max_tokens=12, ignore_eos=True)
    assert make().generate([prompts()[1]], other)[0].outputs[0].token_ids != alone


def test_an_end_token_ends_an_answer_and_is_its_last():
    llm = make()
    (free,) = llm.generate([prompts()[1]], GREEDY)
    third = free.outputs[0].token_ids[2]
    stopping = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(third,))
    (output,) = llm.generate([prompts()[1]], stopping)
    first = free.outputs[0].token_ids.index(third)
    assert output.outputs[0].token_ids == free.outputs[0].token_ids[: first + 1]
    assert output.outputs[0].finish_reason == "stop"


def test_a_bad_request_ends_with_its_error_while_others_go_on(expected):
    llm = make()
    outputs = llm.generate([prompts()[0], [3, 97], [], [1] * 128, prompts()[1]], GREEDY)
    assert [output.error for output in outputs] == [
        None,
        "token 97 at place 1 of the prompt: must be >= 0 and < 97",
        "an empty prompt",
        "prompt of 128 tokens: max_model_len is 128",
        None,
    ]
    assert [outputs[i].outputs[0].token_ids for i in (0, 4)] == expected("llama")[:2]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, "no GPU was found; device='cpu'"),
        ({"backend": "cuda"}, "backend=cuda: must be one of triton, torch"),
        ({"dtype": "int8"}, "dtype=int8: must be one of float32"),
        ({"max_model_len": 129}, "max_model_len=129: the model's context has 128 tokens"),
        ({"scheduling": Priority(preemption_mode="swap")}, "does not move KV to host memory yet"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((ValueError, RuntimeError), match=message):
        make(**settings)
