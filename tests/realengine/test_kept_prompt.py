"""Prompts cut by the attention of their last tokens, against a float64 model that drops the same keys."""

import re

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.selective import SnapKv
from policies.scheduling.fcfs import Fcfs
from realengine.runner.kept_tokens import chosen
from tests.realengine import dropped_keys
from tests.realengine.checkpoints import LLAMA
from tests.realengine.dropped_keys import ASKED, GREEDY, make, num_equal_starts, preempted, tokens_of
from tests.realengine.recorded import record_on_cpu
from tests.realengine.steps import prompts

torch.set_num_threads(1)

KEPT, WINDOW, POOLED = 14, 5, 7
SNAP = SnapKv(num_kept_tokens=KEPT, num_window_tokens=WINDOW, block_size=4)


class CutKeys:
    """Has later queries of a plain model see of a prompt what each KV head of each layer would choose."""

    def __init__(self, num_prompt, cut_from):
        self.num_prompt, self.cut_from = num_prompt, cut_from

    def __call__(self, scores):
        """Masks scores [H, Q, L] of a layer, whose masked elements are -inf."""
        num_heads, num_queries, length = scores.shape
        if self.num_prompt <= KEPT or length <= self.num_prompt:
            return scores
        before = self.num_prompt - WINDOW
        weights = scores[:, before : self.num_prompt].softmax(-1)[..., :before].sum(1)
        weights = weights.view(2, num_heads // 2, before).sum(1)  # two KV heads
        pooled = torch.stack(
            [
                torch.stack([row[max(0, i - POOLED // 2) : i + POOLED // 2 + 1].max() for i in range(before)])
                for row in weights
            ]
        )
        scores = scores.clone()
        for kv_head, row in enumerate(pooled):
            ranked = sorted(range(before), key=lambda i: (-float(row[i]), i))
            dropped = ranked[KEPT - WINDOW :]
            heads = slice(kv_head * num_heads // 2, (kv_head + 1) * num_heads // 2)
            rows = torch.zeros(num_queries, length, dtype=torch.bool)
            rows[self.cut_from :, dropped] = True
            scores[heads] = scores[heads].masked_fill(rows, -torch.inf)
        return scores


@pytest.fixture(scope="module")
def expected():
    return [greedy(prompt, [len(prompt)]) for prompt in ASKED]


def greedy(prompt, prefills):
    return dropped_keys.greedy(prompt, prefills, lambda num: {"masked": CutKeys(len(prompt), num)})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": True},
        {"max_iterations": 5},
        {"batching": Chunked(max_num_batched_tokens=16)},
        {"batching": Chunked(max_num_batched_tokens=7), "overlap": True},
        {"caching": SnapKv(num_kept_tokens=KEPT, num_window_tokens=WINDOW, block_size=16)},
        {"cudagraph_mode": "FULL_AND_PIECEWISE", "overlap": True, "max_num_seqs": 8},
        {"attention_backend": "torch_sdpa"},
        {"max_num_seqs": 2},
    ],
    ids=[
        "plain",
        "overlap",
        "iterations",
        "chunks",
        "small",
        "a block",
        "graphs",
        "sdpa",
        "slots used again",
    ],
)
def test_tokens_are_those_of_a_model_that_masks_the_dropped_keys(settings, expected, monkeypatch):
    """The chunks of 7 tokens also divide the observation window."""
    record_on_cpu(monkeypatch)
    llm = make(**{"caching": SNAP} | settings)
    assert tokens_of(llm.generate(ASKED, GREEDY)) == expected
    llm.engine.core.check_integrity()


def test_other_tokens_follow_if_nothing_is_dropped(expected):
    assert expected != tokens_of(make(Paged()).generate(ASKED, GREEDY))


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_sequences_come_back(mode):
    """Cut prompts are recomputed as a whole, as in the simulator: later tokens may differ."""
    asked = prompts(40, (1, 2, 5, 9, 14, 15, 33))
    llm = make(SNAP, scheduling=Fcfs(preemption_mode=mode), num_kv_blocks=24)
    found, prefills = preempted(llm, asked)
    assert found == [greedy(*each) for each in zip(asked, prefills, strict=True)]


def test_blocks_come_back_and_plans_are_those_of_the_simulators_policy():
    num_steps = 0
    for core in dropped_keys.steps_beside_a_core(SNAP):
        num_steps += 1
        if num_steps == 3:  # all six decode; prompts beyond 14 tokens hold 14, and two outputs
            held = sum(-(-(min(len(prompt), KEPT) + 2) // 4) for prompt in ASKED)
            assert 40 - core.block_pool.num_free == held < sum(-(-len(p) // 4) for p in ASKED)
    assert num_steps >= 30


def test_pooled_sums_choose_clusters():
    """Token 9 has the largest sum: it and its neighbours come first, then those of token 1."""
    sums = torch.zeros(1, 16)
    sums[0, 9], sums[0, 1] = 2.0, 1.0
    assert chosen(sums, 7).tolist() == [[6, 7, 8, 9, 10, 11, 12]]
    assert chosen(sums, 9).tolist() == [[0, 1, 6, 7, 8, 9, 10, 11, 12]]
    assert chosen(sums, 0).shape == (1, 0)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4"])
def test_quantised_keys_are_moved_with_their_scales(kv_cache_dtype, expected):
    found = make(SNAP, kv_cache_dtype=kv_cache_dtype).generate(ASKED, GREEDY)
    assert num_equal_starts(found, expected) >= 4  # wrong places give other tokens at once


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculation=ngram, caching=snapkv: cannot keep the KV of draft tokens behind a sequence",
        ),
        (
            {"config": LLAMA | {"model_type": "mistral", "sliding_window": 7}},
            "caching=SnapKv: a model of type mistral has latent attention, ALiBi or windows of its own",
        ),
    ],
)
def test_what_the_engine_cannot_drop_is_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**{"caching": SNAP} | settings)
