"""Attention sinks with a window on the engine, against a plain model in float64 that masks the same keys."""

import re

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.selective import H2o
from policies.caching.streaming import StreamingLlm
from policies.scheduling.fcfs import Fcfs
from realengine.runner.kept_tokens import KeptWindow
from tests.realengine import dropped_keys
from tests.realengine.checkpoints import LLAMA
from tests.realengine.dropped_keys import ASKED, GREEDY, make, num_equal_starts, preempted, tokens_of
from tests.realengine.recorded import record_on_cpu
from tests.realengine.steps import prompts

torch.set_num_threads(1)

WINDOW = StreamingLlm(num_sink_tokens=3, num_recent_tokens=11, block_size=4)


@pytest.fixture(scope="module")
def expected():
    return [greedy(prompt, [len(prompt)]) for prompt in ASKED]


def greedy(prompt, prefills):
    return dropped_keys.greedy(prompt, prefills, lambda num_prefilled: {"kept": (3, 11, num_prefilled)})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": True},
        {"max_iterations": 5},
        {"batching": Chunked(max_num_batched_tokens=16)},
        {"caching": StreamingLlm(num_sink_tokens=3, num_recent_tokens=11, block_size=16)},
        {"cudagraph_mode": "FULL_AND_PIECEWISE", "overlap": True, "max_num_seqs": 8},
    ],
    ids=["plain", "overlap", "iterations", "chunks", "a block for all", "graphs"],
)
def test_tokens_are_those_of_a_model_that_masks_the_dropped_keys(settings, expected, monkeypatch):
    record_on_cpu(monkeypatch)
    llm = make(**{"caching": WINDOW} | settings)
    assert tokens_of(llm.generate(ASKED, GREEDY)) == expected
    assert expected != tokens_of(make(Paged()).generate(ASKED, GREEDY))
    llm.engine.core.check_integrity()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_sequences_come_back(mode):
    """Once tokens are dropped, all are recomputed as a prompt, as in the simulator: later ones may differ."""
    asked = prompts(40, (1, 2, 5, 9, 14, 15))
    llm = make(WINDOW, scheduling=Fcfs(preemption_mode=mode), num_kv_blocks=16)
    found, prefills = preempted(llm, asked)
    assert max(map(len, prefills)) > 1
    assert found == [greedy(*each) for each in zip(asked, prefills, strict=True)]


def test_blocks_come_back_and_plans_are_those_of_the_simulators_policy():
    num_steps = 0
    for core in dropped_keys.steps_beside_a_core(WINDOW):
        num_steps += 1
        running = {id(seq): seq for seq in core.decodes}.values()
        held = sum(-(-min(seq.num_computed, 14) // 4) for seq in running)
        if num_steps == 12:  # all six decode, the longest ones with 14 of up to 72 tokens
            assert len(running) == 6
            assert 40 - core.block_pool.num_free == held < sum(-(-len(p) // 4) for p in ASKED)
    assert num_steps >= 30


def test_places_by_hand():
    """Two sinks and three recent tokens: token 5 takes the place of token 2, and so on."""
    window = KeptWindow(2, 3)
    slots = torch.zeros(10, dtype=torch.int64)
    assert window.places(torch.arange(10), slots).tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 2, 3]
    assert window.contexts(torch.tensor([1, 5, 6, 99]), slots[:4]).tolist() == [1, 5, 5, 5]
    assert KeptWindow(0, 2).places(torch.arange(5), slots[:5]).tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4"])
def test_quantised_keys_are_moved_with_their_scales(kv_cache_dtype, expected):
    found = make(WINDOW, kv_cache_dtype=kv_cache_dtype).generate(ASKED, GREEDY)
    assert num_equal_starts(found, expected) >= 4  # wrong places give other tokens at once


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"caching": H2o()},
            "caching=H2o: it drops KV by the attention weights of every token, which the engine",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculation=ngram, caching=streaming_llm: cannot keep the KV of draft tokens behind a sequence",
        ),
        (
            {"config": LLAMA | {"model_type": "mistral", "sliding_window": 7}},
            "caching=StreamingLlm: a model of type mistral has latent attention, ALiBi or windows of its own",
        ),
    ],
)
def test_what_the_engine_cannot_drop_is_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**{"caching": WINDOW} | settings)
