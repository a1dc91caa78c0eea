"""The engine against a plain eager model: same tokens whatever the policies do with batches and memory."""

from dataclasses import replace

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.batching.splitfuse import SplitFuse
from policies.batching.static import Dynamic, Static
from policies.batching.whole_prompts import PrefillFirst
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.mlfq import Mlfq
from policies.scheduling.priority import Priority
from policies.scheduling.virtual_token_counter import VirtualTokenCounter
from realengine.model.architecture import Architecture
from realengine.serving.sampling_params import SamplingParams
from realengine.weights.load import load_weights
from tests.realengine.adapters import random_adapter
from tests.realengine.model.lora_models import merged
from tests.realengine.small_models import (
    CONFIGS,
    GREEDY,
    LLAMA,
    counted_loads,
    eager_tokens,
    make,
    prompts,
    tokens_of,
)

torch.set_num_threads(1)


@pytest.mark.parametrize("config", [name for name in CONFIGS if name != "even"])
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


def test_two_engines_of_one_policy_object_share_none_of_its_memory(expected):
    given = VirtualTokenCounter()
    served, idle = (make(scheduling=given) for _ in range(2))
    assert tokens_of(served.generate(prompts(), GREEDY)) == expected("llama")
    assert served.engine.core.scheduling.counter("") > 0
    assert idle.engine.core.scheduling.counter("") == given.counter("") == 0
    given = Mlfq(quantum_tokens=3, num_levels=3)
    for _ in range(2):
        assert tokens_of(make(scheduling=given).generate(prompts(), GREEDY)) == expected("llama")


def test_the_same_tokens_are_drawn_whatever_else_is_in_the_batch():
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
    alone = make().generate([prompts()[1]], params)[0].outputs[0].token_ids
    beside = make(batching=Chunked(max_num_batched_tokens=16)).generate(
        [prompts()[4], prompts()[1], prompts()[2]], params
    )
    assert beside[1].outputs[0].token_ids == alone
    other = SamplingParams(temperature=1.0, top_p=0.9, seed=8, max_tokens=12, ignore_eos=True)
    assert make().generate([prompts()[1]], other)[0].outputs[0].token_ids != alone


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("max_iterations", [1, 3, 16])
@pytest.mark.parametrize("num_kv_blocks", [200, 9])
def test_whatever_runs_ahead_of_the_tokens(overlap, max_iterations, num_kv_blocks, expected):
    llm = make(overlap=overlap, max_iterations=max_iterations, num_kv_blocks=num_kv_blocks)
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected("llama")
    llm.engine.core.check_integrity()
    # An answer that ends by a token: tokens computed beyond it are not emitted, and its memory is free again.
    stops = [
        SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(tokens[4],))
        for tokens in expected("llama")
    ]
    outputs = llm.generate(prompts(), stops)
    for output, tokens in zip(outputs, expected("llama"), strict=True):
        end = tokens.index(tokens[4]) + 1
        assert output.outputs[0].token_ids == tokens[:end]
        assert output.outputs[0].finish_reason == "stop"
    assert llm.engine.core.num_unfinished == 0
    llm.engine.core.check_integrity()


@pytest.mark.parametrize("max_loras", [1, 2])
def test_requests_with_adapters_and_without_go_through_one_batch(max_loras, expected):
    architecture = Architecture.from_hf(LLAMA)
    weights = load_weights(None, architecture, torch.float32, "cpu", seed=1)
    adapters = {
        name: random_adapter(architecture, 4, seed=seed, scaling=40.0) for seed, name in enumerate("ab")
    }
    names = [None, "a", "b", "a", None, "b", "a", "a", "b", None, "b", "a"]
    llm = make(lora_adapters=adapters, max_loras=max_loras, overlap=True, num_kv_blocks=9)
    wanted = list(expected("llama"))
    for place, name in enumerate(names):
        if name is not None:
            own = merged(weights, architecture, adapters[name])
            wanted[place] = eager_tokens(llm, prompts()[place], 12, own)
    assert tokens_of(llm.generate(prompts(), GREEDY, names)) == wanted
    assert sum(a != b for a, b in zip(wanted, expected("llama"), strict=True)) == 9
    # What one has computed is not found by another.
    again = llm.generate([prompts()[2]] * 3, GREEDY, [None, "a", "b"])
    assert again[0].outputs[0].token_ids == expected("llama")[2]
    assert again[2].outputs[0].token_ids == wanted[2]
    (unknown,) = llm.generate([prompts()[0]], GREEDY, "c")
    assert unknown.error == "adapter=c: must be one of the served adapters: a, b"


def test_triton_kernels_give_the_same_tokens(expected):
    """In Triton's interpreter: chunks and decodes, copies on write, swaps, sampling, an adapter."""
    settings = {"backend": "triton", "num_kv_blocks": 20, "scheduling": Fcfs(preemption_mode="swap")}
    settings |= {"caching": PrefixCaching(block_size=4), "batching": Chunked(max_num_batched_tokens=24)}
    short = replace(GREEDY, max_tokens=5)
    llm = make(**settings)
    loads = counted_loads(llm)
    places = (0, 1, 2, 5, 7, 8)
    asked = [prompts()[place] for place in places]
    assert tokens_of(llm.generate(asked, short)) == [expected("llama")[place][:5] for place in places]
    assert loads
    params = SamplingParams(n=2, max_tokens=4, ignore_eos=True, seed=3, top_k=9, presence_penalty=0.5)
    (output,) = llm.generate([prompts()[1]], params)
    (wanted,) = make().generate([prompts()[1]], params)
    assert output.outputs == wanted.outputs


def test_two_ranks_give_the_tokens_of_one():
    one, two = make("even"), make("even", tensor_parallel_size=2)
    params = SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=3)
    assert tokens_of(two.generate(prompts(), GREEDY)) == tokens_of(one.generate(prompts(), GREEDY))
    assert two.generate(prompts()[:2], params)[1].outputs == one.generate(prompts()[:2], params)[1].outputs
