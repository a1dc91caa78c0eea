"""Requests of the asynchronous engine that wait: its limit, and consumers that read late."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from realengine.serving.engine_thread import QueueFullError
from tests.realengine.serving.async_scenarios import (
    ALL,
    GREEDY,
    LONG,
    TIMEOUT_S,
    gated,
    last,
    prompts,
    run_scenario,
    stepwise,
    until,
)

torch.set_num_threads(1)


def test_more_than_max_waiting_stand_in_line_first_come_first_served(expected):
    async def scenario(llm):
        gate, waited = gated(llm)
        order = []

        async def ask(i):
            order.append((await last(llm, prompts()[i]), i)[1])

        tasks = []
        for i in range(12):
            tasks.append(asyncio.create_task(ask(i)))
            await until(lambda i=i: llm.num_unfinished == i + 1)
        gate.set()
        await asyncio.gather(*tasks)
        return waited, order

    waited, order = run_scenario(scenario, max_waiting=2, max_num_seqs=1)
    assert max(waited) == 2
    assert order == list(range(12))


def test_a_full_queue_rejects_and_takes_requests_again_when_there_is_room(expected):
    async def scenario(llm):
        gate, waited = gated(llm)
        tasks = [asyncio.create_task(last(llm, prompts()[i])) for i in range(3)]
        await until(lambda: llm.num_unfinished == 3)
        with pytest.raises(QueueFullError, match="3 waiting, max_waiting=3"):
            await last(llm, prompts()[3])
        gate.set()
        outputs = await asyncio.gather(*tasks)
        return [*outputs, await last(llm, prompts()[3])], waited

    outputs, waited = run_scenario(scenario, max_waiting=3, on_full="reject", max_num_seqs=1)
    assert [output.outputs[0].token_ids for output in outputs] == expected[:4]
    assert max(waited) <= 3


def test_a_request_on_its_way_into_the_engine_counts_as_waiting():
    async def scenario(llm):
        gate, entered, add = threading.Event(), threading.Event(), llm.engine.add

        def gated_add(*args, **more):
            entered.set()
            assert gate.wait(TIMEOUT_S)
            return add(*args, **more)

        llm.engine.add = gated_add
        task = asyncio.create_task(last(llm, prompts()[0]))
        await until(entered.is_set)
        with pytest.raises(QueueFullError, match="1 waiting, max_waiting=1"):
            await last(llm, prompts()[1])
        gate.set()
        return await task

    assert run_scenario(scenario, max_waiting=1, on_full="reject").finished


def test_running_requests_do_not_count_as_waiting():
    async def scenario(llm):
        running = llm.generate(prompts()[0], LONG)
        await anext(running)
        assert len((await last(llm, prompts()[1])).outputs[0].token_ids) == 12
        await running.aclose()

    run_scenario(scenario, max_waiting=1, on_full="reject")


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
def test_a_slow_consumer_finds_the_newest_state_and_misses_nothing(kind, expected):
    async def scenario(llm):
        outputs = []
        async for output in llm.generate(prompts()[0], GREEDY, output_kind=kind):
            outputs.append(output)
            await until(lambda: llm.num_unfinished == 0)  # the engine does not wait for us
        return outputs

    outputs = run_scenario(scenario)
    assert len(outputs) <= 2
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert (tokens[-1] if kind == "cumulative" else sum(tokens, ())) == expected[0]


def test_an_event_loop_that_stands_still_is_reported_once():
    async def scenario(llm):
        outputs, steps = llm.generate(prompts()[0], LONG), stepwise(llm)
        first = await anext(outputs)
        loop, calls = asyncio.get_running_loop(), []
        tell = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), tell(*args))[1]
        steps.release(ALL)
        while llm.num_unfinished:  # no await: the loop stands still
            time.sleep(0.001)
        rest = [output async for output in outputs]
        del loop.call_soon_threadsafe
        return first, rest, calls

    first, rest, calls = run_scenario(scenario)
    assert len(first.outputs[0].token_ids) == 1
    assert len(rest) <= 2
    assert len(rest[-1].outputs[0].token_ids) == 100
    assert len(calls) <= 2
