"""The end of the asynchronous engine: its death, its shutdown, event loops and threads."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from realengine.serving.engine_thread import EngineDeadError
from tests.realengine.serving.async_scenarios import (
    ALL,
    CONFIG,
    GREEDY,
    LONG,
    SETTINGS,
    TIMEOUT_S,
    assert_nothing_left,
    collect,
    gated,
    last,
    make,
    prompts,
    run_scenario,
    stepwise,
    until,
)

torch.set_num_threads(1)


def run_until_failure(scenario, **settings):
    """Runs a coroutine function on an engine that fails, so that its state cannot be checked afterwards."""

    async def run():
        async with make(**settings) as llm:
            return await asyncio.wait_for(scenario(llm), TIMEOUT_S)

    return asyncio.run(run())


def test_when_the_engine_dies_every_request_gets_the_reason():
    async def scenario(llm):
        gate, _ = gated(llm)
        tasks = [asyncio.create_task(last(llm, prompt, LONG)) for prompt in prompts(6)]
        await until(lambda: llm.num_unfinished == 6)
        llm.check_health()

        def failing(plan, num_iterations=1):
            raise KeyError("a bug")

        llm.engine.runner.launch = failing
        gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for later in (lambda: last(llm, prompts()[0]), lambda: asyncio.to_thread(llm.check_health)):
            results += await asyncio.gather(later(), return_exceptions=True)
        assert llm.num_unfinished == 0
        return results

    results = run_until_failure(scenario, max_num_seqs=2, max_waiting=2)
    assert len(results) == 8
    assert len({id(error) for error in results}) == 8
    for error in results:
        assert type(error) is EngineDeadError
        assert "died of KeyError: 'a bug'" in str(error)
        assert type(error.__cause__) is KeyError


def test_shutdown_aborts_what_is_left_and_may_be_called_again():
    async def scenario(llm):
        outputs, steps = llm.generate(prompts()[0], LONG), stepwise(llm)
        steps.release()  # overlapped, the first token comes with the second step
        await anext(outputs)
        waiting = [asyncio.create_task(last(llm, prompts()[i])) for i in range(1, 5)]
        await until(lambda: llm.num_unfinished == 5)
        steps.release(ALL)
        await asyncio.to_thread(llm.shutdown)
        assert llm.engine.num_unfinished == 0  # the thread has ended
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="was shut down; create a new"):
            await last(llm, prompts()[0])
        with pytest.raises(EngineDeadError, match="was shut down; create a new"):
            llm.check_health()
        return [output async for output in outputs][-1:] + await asyncio.gather(*waiting)

    outputs = run_scenario(scenario, max_num_seqs=1, max_waiting=1, overlap=True)
    assert [output.outputs[0].finish_reason for output in outputs] == ["aborted"] * 5


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_a_last_token_that_is_on_its_way_is_waited_for(how, expected):
    """Overlapped: after one step the core has ended the request, and its only token has not been read."""

    async def scenario(llm):
        step, stepped, go_on = llm.engine.step, threading.Semaphore(0), threading.Semaphore(0)

        def stopping_step():
            changed = step()
            stepped.release()
            assert go_on.acquire(timeout=TIMEOUT_S)
            return changed

        llm.engine.step = stopping_step
        task = asyncio.create_task(collect(llm, prompts()[0], replace(GREEDY, max_tokens=1), request_id="a"))
        await until(lambda: stepped.acquire(blocking=False))
        assert (llm.engine.num_unfinished, llm.engine.core.num_unfinished) == (1, 0)
        ending = asyncio.create_task(llm.abort("a") if how == "abort" else asyncio.to_thread(llm.shutdown))
        await asyncio.sleep(0.01)
        go_on.release()  # the thread gives it up, in vain, and steps
        await until(lambda: stepped.acquire(blocking=False))
        await asyncio.sleep(0.01)  # the consumer has looked, and found nothing new
        go_on.release()
        await ending
        return await task

    (output,) = run_scenario(scenario, overlap=True)
    assert output.outputs[0].token_ids == expected[0][:1]
    assert output.outputs[0].finish_reason == "length"


def test_shutdown_may_come_from_the_engine_s_own_thread():
    """The garbage collector may run in that thread."""

    async def scenario(llm):
        step = llm.engine.step
        llm.engine.step = lambda: (step(), llm.shutdown())[0]
        return await last(llm, prompts()[0], LONG)

    assert run_scenario(scenario).outputs[0].finish_reason == "aborted"


def test_event_loops_in_several_threads_share_an_engine(expected):
    llm = make()
    results = {}

    async def ask(first):
        return await asyncio.gather(*(last(llm, prompts()[i]) for i in range(first, first + 8)))

    def serve(first):
        results[first] = asyncio.run(ask(first))

    threads = [threading.Thread(target=serve, args=(first,)) for first in (0, 8, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    llm.shutdown()
    outputs = [output for first in (0, 8, 16) for output in results[first]]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert_nothing_left(llm)


def test_a_request_whose_event_loop_was_closed_is_aborted():
    llm = make()
    loop = asyncio.new_event_loop()
    outputs = llm.generate(prompts()[0], LONG)
    loop.run_until_complete(anext(outputs))
    loop.close()
    deadline_s = time.monotonic() + TIMEOUT_S
    while llm.num_unfinished:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert len(asyncio.run(last(llm, prompts()[1])).outputs[0].token_ids) == 12
    llm.shutdown()
    assert_nothing_left(llm)


def test_an_engine_without_requests_sleeps():
    async def scenario(llm):
        await last(llm, prompts()[0])
        used_s = time.process_time()
        await asyncio.sleep(0.2)
        return time.process_time() - used_s

    assert run_scenario(scenario) < 0.05


def test_an_engine_that_is_forgotten_ends_its_thread():
    before = set(threading.enumerate())
    llm = make()
    (thread,) = set(threading.enumerate()) - before
    del llm
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_python_ends_while_requests_run():
    """Nothing is shut down here: a request runs, another loop was left, and the program ends."""
    script = f"""
        import asyncio
        import time
        import torch
        from realengine.model.architecture import Architecture
        from realengine.serving.async_llm import AsyncLLM
        from realengine.serving.sampling_params import SamplingParams

        torch.set_num_threads(1)
        llm = AsyncLLM(Architecture.from_hf({CONFIG}), **{SETTINGS})
        step = llm.engine.step
        llm.engine.step = lambda: (time.sleep(0.01), step())[1]
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        loop = asyncio.new_event_loop()
        outputs = [llm.generate([1, 2, 3], params) for _ in range(4)]
        for one in outputs:
            loop.run_until_complete(anext(one))
        print(llm.num_unfinished)
    """
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 0
