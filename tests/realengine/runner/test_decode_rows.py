"""Rows that are kept from step to step give the work that rows made anew give."""

import random
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.radix import Radix
from policies.scheduling.fcfs import Fcfs
from realengine.runner.work import SAMPLING_WORDS
from realengine.serving.sampling_params import SamplingParams
from tests.realengine.adapters import random_adapter
from tests.realengine.small_models import make, prompts
from tests.realengine.speculation.methods import LIKE_TARGET

torch.set_num_threads(1)

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
ADAPTERS = {name: random_adapter(LIKE_TARGET, 4, seed=seed) for seed, name in enumerate("ab")}


def works(settings, *, anew):
    """Returns the work of all steps, while requests of all kinds arrive and are aborted at any time."""
    llm = make(**settings)
    engine, generator, done = llm.engine, random.Random(7), []
    inner = engine.runner.execute

    def execute(work):
        words = None if work.words is None else work.words.copy()
        done.append((work.shape, words, work.table_updates))
        return inner(work)

    engine.runner.execute = execute
    waiting = [(prompt, params) for prompt in prompts() for params in kinds()]
    generator.shuffle(waiting)
    names = [None, *settings.get("lora_adapters", ())]
    while waiting or engine.num_unfinished:
        if waiting and generator.random() < 0.4:
            prompt, params = waiting.pop()
            answer = engine.add(prompt, params, lora=generator.choice(names))
            assert answer.error is None
            if generator.random() < 0.1:
                engine.abort(answer.request_id)
        if anew:
            engine.runner._members.forget()
        engine.step()
    engine.core.check_integrity()
    return done


def kinds():
    yield PARAMS
    yield replace(PARAMS, temperature=0.9, top_p=0.9, seed=3, max_tokens=9)
    yield replace(PARAMS, presence_penalty=0.4, max_tokens=5)
    yield replace(PARAMS, logprobs=2, max_tokens=3)
    yield replace(PARAMS, n=3, temperature=1.0, max_tokens=6)


@pytest.mark.sampled(fast=2, slow=4)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_kv_blocks": 24, "caching": Paged()},
        {"num_kv_blocks": 24, "scheduling": Fcfs(preemption_mode="swap")},
        {"caching": Radix(), "batching": Chunked(max_num_batched_tokens=24)},
        {"max_iterations": 4, "overlap": True},
        {"lora_adapters": ADAPTERS, "max_loras": 2},
    ],
    ids=["plain", "recompute", "swap", "radix", "iterations", "adapters"],
)
def test_kept_rows_pack_the_same_work(settings):
    kept, anew = (works(settings, anew=anew) for anew in (False, True))
    assert len(kept) == len(anew) > 100
    for (shape, words, updates), (other_shape, other_words, other_updates) in zip(kept, anew, strict=True):
        assert shape == other_shape
        assert np.array_equal(words, other_words)
        assert np.array_equal(updates, other_updates)
        if shape is not None and shape.is_decode:
            contexts = words[(SAMPLING_WORDS + 2) * shape.num_rows :][: shape.num_rows]
            assert shape.max_context_len == contexts.max() + shape.num_iterations - 1
