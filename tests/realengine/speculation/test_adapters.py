"""Requests with LoRA adapters get the tokens that they get without drafts, with every way to draft."""

from functools import cache

import pytest
import torch

from tests.realengine.adapters import random_adapter
from tests.realengine.recorded import record_on_cpu
from tests.realengine.small_models import make
from tests.realengine.speculation.methods import DRAFTERS, LIKE_TARGET
from tests.realengine.speculation.test_graphs import WAYS
from tests.realengine.speculation.test_lossless import plain_outputs, prompts, tokens_of

torch.set_num_threads(1)

NAMES = [None, "a", "b", "a", None, "b"]


def settings(max_loras=2):
    adapters = {
        name: random_adapter(LIKE_TARGET, 4, seed=seed, scaling=40.0) for seed, name in enumerate("ab")
    }
    return {"lora_adapters": adapters, "max_loras": max_loras}


@pytest.fixture(scope="module")
def plain_tokens():
    """Returns a function that gives the tokens of an engine with the adapters and without drafts."""
    return cache(lambda way: tokens_of(make(**settings()).generate(prompts(), WAYS[way], NAMES)))


def test_adapters_change_the_tokens_of_their_requests(plain_tokens):
    for way in ("greedy", "sampled"):
        pairs = zip(plain_tokens(way), tokens_of(plain_outputs(WAYS[way])), strict=True)
        assert [name is None for name in NAMES] == [one == other for one, other in pairs]


@pytest.mark.sampled(fast=7, slow=16)
@pytest.mark.parametrize(
    ("way", "has_graphs"),
    [
        ("greedy", True),
        ("sampled", False),
        pytest.param("greedy", False, marks=pytest.mark.slow),
        pytest.param("sampled", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("method", DRAFTERS)
def test_adapters_change_no_token(monkeypatch, method, way, has_graphs, plain_tokens):
    recorders = record_on_cpu(monkeypatch)
    mode = "FULL_DECODE_ONLY" if has_graphs else "NONE"
    llm = make(**settings(), cudagraph_mode=mode, speculative_config=DRAFTERS[method])
    assert tokens_of(llm.generate(prompts(), WAYS[way], NAMES)) == plain_tokens(way)
    assert (sum(each.num_replayed for each in recorders) > 0) == has_graphs


@pytest.mark.parametrize("method", DRAFTERS)
def test_adapters_that_replace_each_other_change_no_token(method, plain_tokens):
    """One slot: requests of the other adapter wait until it is loaded."""
    llm = make(**settings(max_loras=1), speculative_config=DRAFTERS[method])
    assert tokens_of(llm.generate(prompts(), WAYS["greedy"], NAMES)) == plain_tokens("greedy")
