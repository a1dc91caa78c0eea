"""KV that is swapped, evicted, kept or shared gives the tokens of a plain eager model."""

from dataclasses import replace

import pytest
import torch

from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.caching.tiered import Tiered
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.mlfq import Mlfq
from realengine.serving.sampling_params import SamplingParams
from tests.realengine.small_models import (
    GREEDY,
    assert_drawn,
    counted_loads,
    eager_tokens,
    make,
    prompts,
    tokens_of,
)

torch.set_num_threads(1)


SWAPPING = {
    "Fcfs": Fcfs(preemption_mode="swap"),
    "Mlfq": Mlfq(quantum_tokens=3, num_levels=3, preemption_mode="swap"),
}


@pytest.mark.sampled(fast=2, slow=4)
@pytest.mark.parametrize(
    ("scheduling", "overlap"),
    [
        pytest.param(SWAPPING["Fcfs"], False, id="Fcfs-in turn"),
        pytest.param(SWAPPING["Mlfq"], True, id="Mlfq-overlapped"),
        pytest.param(SWAPPING["Fcfs"], True, id="Fcfs-overlapped", marks=pytest.mark.slow),
        pytest.param(SWAPPING["Mlfq"], False, id="Mlfq-in turn", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("caching", [Paged(block_size=4), PrefixCaching(block_size=4), Radix(block_size=4)])
def test_what_was_swapped_to_host_memory_comes_back_as_it_was(scheduling, caching, overlap, expected):
    llm = make(scheduling=scheduling, caching=caching, overlap=overlap, num_kv_blocks=20)
    loads = counted_loads(llm)
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected("llama")
    assert len(loads) > 3
    params = SamplingParams(n=3, max_tokens=9, ignore_eos=True, seed=5)
    for prompt, output in zip(prompts(), llm.generate(prompts(), params), strict=True):
        for one in output.outputs:
            assert_drawn(prompt, one.token_ids, params, one.index)


@pytest.mark.parametrize("write", ["back", "through"])
@pytest.mark.parametrize("host_blocks", [12, 100])
def test_what_the_gpu_evicts_is_found_in_host_memory(write, host_blocks, expected):
    block_bytes = 2 * 2 * 2 * 16 * 4 * 4  # keys and values, layers, heads, head_dim, tokens, float32
    caching = Tiered(block_size=4, host_gib=host_blocks * block_bytes / 2**30, write=write, min_load_tokens=4)
    llm = make(caching=caching, num_kv_blocks=30, overlap=True)
    loads = counted_loads(llm)
    for _ in range(2):
        for prompt, tokens in zip(prompts(), expected("llama"), strict=True):
            assert tokens_of(llm.generate([prompt], GREEDY)) == [tokens]
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected("llama")
    assert loads
    llm.engine.core.check_integrity()


@pytest.mark.parametrize("caching", [PrefixCaching(block_size=4), Radix(block_size=4)])
def test_the_next_turn_finds_prompt_and_answer_of_the_last(caching):
    llm = make(caching=caching)
    (first,) = llm.generate([prompts()[2]], GREEDY)
    turn = [*first.prompt_token_ids, *first.outputs[0].token_ids, 9, 8]
    found = {}
    answer = llm.engine.add(turn, GREEDY)
    while not answer.is_finished:
        llm.engine.step()
        seq = llm.engine.core.find(answer.request_id)
        if seq is not None:
            found["tokens"] = seq.num_found
    assert found["tokens"] == (len(turn) - 3) // 4 * 4  # the last answer token's KV was never computed
    assert tuple(answer.outputs[0].tokens) == eager_tokens(llm, turn, 12)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_the_next_turn_finds_what_an_aborted_request_has_computed(overlap):
    """An overlapped engine has computed one token more, which it has not read."""
    llm = make(caching=PrefixCaching(block_size=4), num_kv_blocks=30, overlap=overlap)
    prompt = prompts()[4][:30]
    answer = llm.engine.add(prompt, replace(GREEDY, max_tokens=24))
    while len(answer.outputs[0].tokens) < 11:
        llm.engine.step()
    num_computed = llm.engine.core.find(answer.request_id).num_computed
    llm.engine.abort(answer.request_id)
    assert num_computed == 40 + overlap
    turn = prompt + answer.outputs[0].tokens + [5, 6, 7]
    second = llm.engine.add(turn, GREEDY)
    llm.engine.step()
    assert llm.engine.core.find(second.request_id).num_found == 40
    llm.engine.run()
    assert tuple(second.outputs[0].tokens) == eager_tokens(llm, turn, 12)
