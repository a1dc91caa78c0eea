"""Scenarios of an asynchronous engine of a small model, and engines that step slowly."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import replace

from realengine.model.architecture import Architecture
from realengine.serving.async_llm import AsyncLLM
from realengine.serving.sampling_params import SamplingParams

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 259,
}
SETTINGS = {"device": "cpu", "seed": 1, "num_kv_blocks": 60, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=100)
TIMEOUT_S = 60


def make(**settings):
    return AsyncLLM(Architecture.from_hf(CONFIG), **(SETTINGS | settings))


def prompts(num=24):
    generator = random.Random(5)
    return [[generator.randrange(259) for _ in range(generator.randint(1, 25))] for _ in range(num)]


def run_scenario(scenario, **settings):
    """Runs a coroutine function on an engine of its own; nothing must be left behind in it."""

    async def run():
        async with make(**settings) as llm:
            result = await asyncio.wait_for(scenario(llm), TIMEOUT_S)
            await until(lambda: llm.num_unfinished == 0)
        return llm, result

    llm, result = asyncio.run(run())
    assert_nothing_left(llm)
    return result


def assert_nothing_left(llm):
    core = llm.engine.core
    assert (llm.engine.num_unfinished, core.num_unfinished, core.block_pool.num_used) == (0, 0, 0)
    assert len(core.free_slots) == core.max_num_seqs
    core.check_integrity()


async def until(holds):
    deadline_s = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline_s, "it never came"
        await asyncio.sleep(0.001)


async def collect(llm, prompt, params=GREEDY, **settings):
    return [output async for output in llm.generate(prompt, params, **settings)]


async def last(llm, prompt, params=GREEDY, **settings):
    return (await collect(llm, prompt, params, **settings))[-1]


def gated(llm):
    """Steps wait for the gate from now on. Also: how many requests waited in the core before each."""
    gate, waited, step = threading.Event(), [], llm.engine.step

    def gated_step():
        assert gate.wait(TIMEOUT_S)
        waited.append(llm.engine.core.num_waiting)
        return step()

    llm.engine.step = gated_step
    return gate, waited


def stepwise(llm):
    """Returns a semaphore of which each step takes one from now on: a consumer decides how far they go."""
    steps, step = threading.Semaphore(1), llm.engine.step

    def one_step():
        assert steps.acquire(timeout=TIMEOUT_S)
        return step()

    llm.engine.step = one_step
    return steps


ALL = 1000
"""More steps than any request takes."""


def recorded(llm):
    """Returns a list that grows by the engine's answer to each request that enters from now on."""
    answers, add = [], llm.engine.add
    llm.engine.add = lambda *args, **more: (answers.append(add(*args, **more)), answers[-1])[1]
    return answers
