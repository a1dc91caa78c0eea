"""Requests of the asynchronous engine that end early: aborted, cancelled, or without a consumer."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from policies.batching.chunked import Chunked
from tests.realengine.serving.async_scenarios import (
    ALL,
    GREEDY,
    LONG,
    TIMEOUT_S,
    collect,
    gated,
    last,
    prompts,
    recorded,
    run_scenario,
    stepwise,
    until,
)

torch.set_num_threads(1)


def paced(llm):
    """Lets the event loop turn before each step from now on, so that consumers see every step's tokens."""
    loop, step = asyncio.get_running_loop(), llm.engine.step

    async def turn():
        for _ in range(5):
            await asyncio.sleep(0)

    def paced_step():
        asyncio.run_coroutine_threadsafe(turn(), loop).result(TIMEOUT_S)
        return step()

    llm.engine.step = paced_step


def test_abort_ends_a_request_on_its_way_and_frees_its_memory(expected):
    async def scenario(llm):
        other, steps = asyncio.create_task(last(llm, prompts()[1])), stepwise(llm)
        outputs = []
        async for output in llm.generate(prompts()[0], LONG, request_id="mine"):
            outputs.append(output)
            if len(outputs) == 3:
                await llm.abort("mine")
                await llm.abort("mine")
                await llm.abort("unknown")
            steps.release(ALL if len(outputs) == 3 else 1)
        return outputs, await other

    outputs, other = run_scenario(scenario)
    assert outputs[-1].outputs[0].finish_reason == "aborted"
    assert outputs[-1].request_id == "mine"
    tokens = outputs[-1].outputs[0].token_ids
    assert 3 <= len(tokens) < 100
    assert tokens[:12] == expected[0][: len(tokens)]
    assert other.outputs[0].token_ids == expected[1]


def test_abort_reaches_a_request_that_waits_or_stands_in_line():
    async def scenario(llm):
        gate, _ = gated(llm)
        tasks = [asyncio.create_task(last(llm, prompts()[i], request_id=str(i))) for i in range(5)]
        await until(lambda: llm.num_unfinished == 5)
        for i in (1, 2, 3, 4):
            await llm.abort(str(i))
        gate.set()
        return await asyncio.gather(*tasks)

    outputs = run_scenario(scenario, max_num_seqs=1, max_waiting=2)
    ends = [(len(output.outputs[0].token_ids), output.outputs[0].finish_reason) for output in outputs]
    assert ends == [(12, "length")] + [(0, "aborted")] * 4


@pytest.mark.parametrize("how", ["cancel", "break", "close", "exception"])
def test_a_consumer_that_goes_away_aborts_its_request(how):
    async def consume(llm, has_begun):
        if how == "close":
            async with aclosing(llm.generate(prompts()[0], LONG)) as outputs:
                async for _ in outputs:
                    return
        async for _ in llm.generate(prompts()[0], LONG):
            has_begun.set()
            if how == "break":
                break
            if how == "exception":
                raise KeyError("the consumer's own")

    async def scenario(llm):
        answers, has_begun, steps = recorded(llm), asyncio.Event(), stepwise(llm)
        task = asyncio.create_task(consume(llm, has_begun))
        if how == "cancel":
            await has_begun.wait()
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)  # after a break, the event loop closes the iterator
        steps.release(ALL)
        await until(lambda: llm.num_unfinished == 0)
        assert answers[0].outputs[0].finish_reason == "aborted"
        return result

    result = run_scenario(scenario)
    assert type(result) is {"cancel": asyncio.CancelledError, "exception": KeyError}.get(how, type(None))


def test_cancelled_before_its_turn_it_never_enters_the_engine():
    async def scenario(llm):
        answers, (gate, _) = recorded(llm), gated(llm)
        tasks = [asyncio.create_task(last(llm, prompts()[i])) for i in range(4)]
        await until(lambda: llm.num_unfinished == 4 and len(answers) == 1)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        gate.set()
        await tasks[0]
        return len(answers)

    assert run_scenario(scenario, max_num_seqs=1, max_waiting=1) == 1


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_fifty_requests_with_random_ends_leave_nothing_behind(overlap, offline):
    """Some are aborted, some cancelled, some closed, after a random number of outputs; the rest are right."""
    generator = random.Random(11)
    asked = [
        (prompt, replace(GREEDY, max_tokens=generator.randint(1, 40)), generator.choice(ENDS))
        for prompt in prompts(50)
    ]

    async def ask(llm, number):
        prompt, params, end = asked[number]
        outputs, patience = [], generator.randint(0, 6)
        await asyncio.sleep(generator.random() * 0.05)
        if end == "cancel":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stay(llm, prompt, params), generator.random() * 0.05)
            return None
        async with aclosing(llm.generate(prompt, params, request_id=str(number))) as stream:
            async for output in stream:
                outputs.append(output)
                if end == "close" and len(outputs) > patience:
                    return None
                if end == "abort" and len(outputs) > patience:
                    await llm.abort(str(number))
        return outputs[-1]

    async def scenario(llm):
        paced(llm)
        return await asyncio.gather(*(ask(llm, number) for number in range(50)))

    outputs = run_scenario(
        scenario, overlap=overlap, num_kv_blocks=14, batching=Chunked(max_num_batched_tokens=24)
    )
    truth = offline.generate([prompt for prompt, _, _ in asked], [params for _, params, _ in asked])
    ended = [output.outputs[0].finish_reason for output in outputs if output is not None]
    assert ended.count("aborted") > 3
    assert ended.count("length") > 10
    for output, whole in zip(outputs, truth, strict=True):
        if output is not None:
            tokens = output.outputs[0].token_ids
            assert tokens == whole.outputs[0].token_ids[: len(tokens)]
            assert output.outputs[0].finish_reason == "aborted" or len(tokens) == len(
                whole.outputs[0].token_ids
            )


ENDS = ("length", "length", "abort", "cancel", "close")


async def stay(llm, prompt, params):
    await collect(llm, prompt, params)
    await asyncio.Event().wait()  # until the timeout, even where the answer was fast
