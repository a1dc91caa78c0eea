"""The sleep mode: memory is free while an engine sleeps, and the tokens after it are those before."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from contextlib import aclosing

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from policies.caching.tiered import Tiered
from realengine.model.architecture import Architecture
from realengine.model.quantization import weights_on
from realengine.serving.async_llm import AsyncLLM
from realengine.serving.sampling_params import SamplingParams
from realengine.settings import EngineSettings
from realengine.weights.load import load_weights
from tests.realengine.adapters import random_adapter
from tests.realengine.serving.async_scenarios import CONFIG, GREEDY, LONG, SETTINGS

torch.set_num_threads(1)

TIMEOUT_S = 120
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True, min_tokens=3, top_p=0.9)
PROMPT = random.Random(1).choices(range(250), k=40)
MIB = 1 << 20


def run(test, **settings):
    """Runs a coroutine function with an engine that may sleep."""

    async def whole():
        async with AsyncLLM(
            Architecture.from_hf(CONFIG), **SETTINGS | {"enable_sleep_mode": True} | settings
        ) as llm:
            return await asyncio.wait_for(test(llm), TIMEOUT_S)

    return asyncio.run(whole())


async def output(llm, params=GREEDY, prompt=PROMPT, lora=None):
    async for last in llm.generate(prompt, params, output_kind="final_only", lora=lora):
        return last


SETUPS = {
    "plain": {},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int4 KV": {"kv_cache_dtype": "int4"},
    "4-bit weights": {"quantization": "w8a16"},
    "overlapped": {"overlap": True},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "a draft model": {
        "speculative_config": {
            "method": "draft_model",
            "model": Architecture.from_hf(CONFIG),
            "num_speculative_tokens": 2,
        }
    },
}


@pytest.mark.sampled(fast=2, slow=5)
@pytest.mark.parametrize("setup", SETUPS)
def test_tokens_after_a_sleep_are_those_before(setup):
    async def test(llm):
        async def tokens():
            found = [await output(llm, params) for params in (GREEDY, SAMPLED)]
            return [each.outputs[0].token_ids for each in found], found[0].num_cached_tokens

        before, _ = await tokens()
        for level in (1, 2, 1):
            assert not llm.is_sleeping
            await llm.sleep(level)
            assert llm.is_sleeping
            await llm.wake_up()
            after, num_cached = await tokens()
            assert after == before
            assert num_cached == 0, "the prefix cache must be empty"
        assert not llm.is_sleeping

    run(test, **SETUPS[setup])


def test_adapters_are_loaded_again():
    spec = Architecture.from_hf(CONFIG)
    adapters = {"a": random_adapter(spec, 4, seed=1), "b": random_adapter(spec, 8, seed=2)}

    async def test(llm):
        before = [(await output(llm, lora=name)).outputs[0].token_ids for name in (None, "a", "b")]
        await llm.sleep()
        await llm.wake_up()
        assert [(await output(llm, lora=name)).outputs[0].token_ids for name in (None, "a", "b")] == before

    run(test, lora_adapters=adapters)


def tensor_bytes():
    """Returns the bytes of all tensors of the process; its resident memory also has what malloc keeps."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_frees_the_memory(level):
    """KV of 64 MiB, which is written, and weights of 99 MiB, which level 1 keeps: they are in host memory."""
    spec = Architecture.from_hf(CONFIG | {"vocab_size": 50_000, "hidden_size": 256, "eos_token_id": 1})
    kv_bytes, weight_bytes = 64 * MIB, 2 * 50_000 * 256 * 4

    async def whole():
        settings = SETTINGS | {"enable_sleep_mode": True, "num_kv_blocks": kv_bytes // (2 * 16 * 16 * 4) - 1}
        async with AsyncLLM(spec, **settings) as llm:
            executor = llm._sleep_mode._executor
            keys, values = executor._cache.layers[0][:2]
            assert keys.nbytes + values.nbytes == kv_bytes
            keys.fill_(1), values.fill_(1)
            held = [weakref.ref(keys), weakref.ref(executor._decoder)]
            del keys, values, executor
            before = tensor_bytes()
            await llm.sleep(level)
            freed = before - tensor_bytes()
            assert [each() for each in held] == [None, None]
            expected = kv_bytes + (weight_bytes if level == 2 else 0)
            assert 0.9 * expected < freed < 1.2 * expected
            await llm.wake_up()
            assert (await output(llm)).outputs[0].finish_reason == "length"

    gc.collect()
    asyncio.run(asyncio.wait_for(whole(), TIMEOUT_S))


def test_requests_in_progress_are_aborted_and_later_ones_wait_for_the_wake_up():
    async def test(llm):
        async with aclosing(llm.generate(PROMPT, LONG)) as stream:
            await anext(stream)
            await llm.sleep()
            *_, last = [each async for each in stream]
            assert last.outputs[0].finish_reason == "aborted"
        waiting = asyncio.create_task(output(llm))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        assert llm.num_unfinished == 1
        llm.clear_prefix_cache()
        await llm.sleep()  # does nothing to an engine that sleeps, but aborts what waits
        assert (await waiting).outputs[0].finish_reason == "aborted"
        waiting = asyncio.create_task(output(llm))
        await asyncio.sleep(0)
        await llm.wake_up()
        assert (await waiting).outputs[0].finish_reason == "length"

    run(test)


def test_requests_in_progress_are_served_before_if_asked():
    async def test(llm):
        async with aclosing(llm.generate(PROMPT, LONG)) as stream:
            await anext(stream)
            sleeping = asyncio.create_task(llm.sleep(mode="wait"))
            *_, last = [each async for each in stream]
            assert last.outputs[0].finish_reason == "length"
            await sleeping
        assert llm.is_sleeping

    run(test)


def test_a_wake_up_that_fails_leaves_it_asleep(monkeypatch):
    async def test(llm):
        before = await output(llm)
        await llm.sleep()
        build = llm._sleep_mode._build

        def fail(weights):
            raise ValueError("no memory")

        monkeypatch.setattr(llm._sleep_mode, "_build", fail)
        with pytest.raises(ValueError, match="no memory"):
            await llm.wake_up()
        assert llm.is_sleeping
        monkeypatch.setattr(llm._sleep_mode, "_build", build)
        await llm.wake_up()
        assert (await output(llm)).outputs[0].token_ids == before.outputs[0].token_ids

    run(test)


def test_an_engine_that_sleeps_can_be_ended():
    async def test(llm):
        await llm.sleep(2)
        return asyncio.create_task(output(llm))

    async def whole():
        async with AsyncLLM(Architecture.from_hf(CONFIG), **SETTINGS | {"enable_sleep_mode": True}) as llm:
            waiting = await test(llm)
            await asyncio.sleep(0)
        return await waiting

    assert asyncio.run(asyncio.wait_for(whole(), TIMEOUT_S)).outputs[0].finish_reason == "aborted"


def test_wrong_calls_are_refused():
    async def test(llm):
        with pytest.raises(ValueError, match="level=3: must be one of 1, 2"):
            await llm.sleep(3)
        with pytest.raises(ValueError, match="mode=now: must be one of abort, wait"):
            await llm.sleep(mode="now")
        await llm.wake_up()
        assert (await output(llm)).outputs[0].finish_reason == "length"

    run(test)

    async def disabled(llm):
        with pytest.raises(ValueError, match="the sleep mode is not enabled; set enable_sleep_mode=True"):
            await llm.sleep()

    run(disabled, enable_sleep_mode=False)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel_size": 2}, "enable_sleep_mode: tensor_parallel_size=2 must be 1"),
        ({"caching": Tiered(host_gib=1.0)}, "enable_sleep_mode: a sleep would lose the KV"),
    ],
    ids=["ranks", "tiers"],
)
def test_settings_that_cannot_sleep_are_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        EngineSettings(device="cpu", enable_sleep_mode=True, **settings)


@pytest.mark.parametrize("quantization", [None, "w8a16", "w4a16"])
def test_moved_weights_are_the_same_and_tied_ones_stay_one(quantization):
    spec = Architecture.from_hf(
        CONFIG | {"tie_word_embeddings": True, "hidden_size": 64, "intermediate_size": 64}
    )
    weights = load_weights(None, spec, torch.float32, torch.device("cpu"), quantization=quantization)
    moved = weights_on(weights, torch.device("cpu"))
    assert moved.keys() == weights.keys()
    assert moved["head.weight"] is moved["embedding.weight"]
    copies = weights_on(weights, torch.device("meta"))
    assert copies["head.weight"] is copies["embedding.weight"]
    for name, weight in weights.items():
        parts = weight if isinstance(weight, tuple) else (weight,)
        others = copies[name] if isinstance(weight, tuple) else (copies[name],)
        assert type(weight) is type(copies[name])
        for part, other in zip(parts, others, strict=True):
            assert not isinstance(part, torch.Tensor) or (part.shape, part.dtype) == (
                other.shape,
                other.dtype,
            )
