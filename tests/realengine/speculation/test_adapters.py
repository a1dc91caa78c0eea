"""Requests with LoRA adapters get the tokens that they get without drafts, with every way to draft."""

import pytest
import torch

from tests.realengine.adapters import random_adapter
from tests.realengine.recorded import record_on_cpu
from tests.realengine.speculation.methods import DRAFTERS, LIKE_TARGET
from tests.realengine.speculation.test_graphs import WAYS
from tests.realengine.speculation.test_lossless import prompts, tokens_of
from tests.realengine.test_engine import make

torch.set_num_threads(1)

NAMES = [None, "a", "b", "a", None, "b"]


def settings(max_loras=2):
    adapters = {
        name: random_adapter(LIKE_TARGET, 4, seed=seed, scaling=40.0) for seed, name in enumerate("ab")
    }
    return {"lora_adapters": adapters, "max_loras": max_loras}


@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("way", ["greedy", "sampled"])
@pytest.mark.parametrize("method", DRAFTERS)
def test_adapters_change_no_token(monkeypatch, method, way, use_graphs):
    recorders = record_on_cpu(monkeypatch)
    plain = make(**settings()).generate(prompts(), WAYS[way], NAMES)
    llm = make(**settings(), use_graphs=use_graphs, speculative_config=DRAFTERS[method])
    assert tokens_of(llm.generate(prompts(), WAYS[way], NAMES)) == tokens_of(plain)
    assert (sum(each.num_replayed for each in recorders) > 0) == use_graphs
    without = tokens_of(make().generate(prompts(), WAYS[way]))
    assert [name is None for name in NAMES] == [
        one == other for one, other in zip(tokens_of(plain), without, strict=True)
    ]


@pytest.mark.parametrize("method", DRAFTERS)
def test_adapters_that_replace_each_other_change_no_token(method):
    """One slot: requests of the other adapter wait until it is loaded."""
    plain = make(**settings()).generate(prompts(), WAYS["greedy"], NAMES)
    llm = make(**settings(max_loras=1), speculative_config=DRAFTERS[method])
    assert tokens_of(llm.generate(prompts(), WAYS["greedy"], NAMES)) == tokens_of(plain)
