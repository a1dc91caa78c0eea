"""The asynchronous engine: the tokens of the offline one, streamed, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from policies.batching.chunked import Chunked
from realengine.model.architecture import Architecture
from realengine.serving.async_llm import AsyncLLM
from realengine.serving.engine_thread import EngineDeadError, QueueFullError
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.serving.tokenizer import Tokenizer

torch.set_num_threads(1)

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


@pytest.fixture(scope="module")
def offline():
    """Returns an LLM with the same weights."""
    return LLM(Architecture.from_hf(CONFIG), **SETTINGS)


@pytest.fixture(scope="module")
def expected(offline):
    """Returns the greedy tokens of every prompt, 12 each."""
    return [output.outputs[0].token_ids for output in offline.generate(prompts(), GREEDY)]


@pytest.fixture(scope="module")
def tokenizer():
    """Returns a tokenizer with one token per byte, so that random tokens are also partial characters."""
    tokenizers = pytest.importorskip("tokenizers", reason="text needs the package tokenizers")
    vocab = {letter: i for i, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(bytes_only, eos_token_ids=(259,))


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


def run_until_failure(scenario, **settings):
    """Runs a coroutine function on an engine that fails, so that its state cannot be checked afterwards."""

    async def run():
        async with make(**settings) as llm:
            return await asyncio.wait_for(scenario(llm), TIMEOUT_S)

    return asyncio.run(run())


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


ALL = 1000
"""More steps than any request takes."""


def recorded(llm):
    """Returns a list that grows by the engine's answer to each request that enters from now on."""
    answers, add = [], llm.engine.add
    llm.engine.add = lambda *args, **more: (answers.append(add(*args, **more)), answers[-1])[1]
    return answers


@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap": True, "max_iterations": 3}, {"num_kv_blocks": 9}, {"max_waiting": 1}],
    ids=lambda settings: ",".join(settings) or "plain",
)
def test_many_at_once_get_the_tokens_of_the_offline_engine(settings, expected):
    async def scenario(llm):
        return await asyncio.gather(*(last(llm, prompt) for prompt in prompts()))

    outputs = run_scenario(scenario, **settings)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in prompts()]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_cumulative_outputs_grow_and_deltas_join_to_them(expected):
    async def scenario(llm):
        steps = stepwise(llm)

        async def collect_each():
            outputs = []
            async for output in llm.generate(prompts()[2], GREEDY):
                outputs.append(output)
                steps.release(ALL if output.finished else 1)
            return outputs

        others = (collect(llm, prompts()[2], output_kind=kind) for kind in ("delta", "final_only"))
        return await asyncio.gather(collect_each(), *others)

    cumulative, deltas, final = run_scenario(scenario)
    tokens = [output.outputs[0].token_ids for output in cumulative]
    assert tokens == [expected[2][:length] for length in range(1, 13)]
    assert sum((output.outputs[0].token_ids for output in deltas), ()) == expected[2]
    assert all(output.outputs[0].token_ids for output in deltas)
    assert [output.outputs[0].token_ids for output in final] == [expected[2]]
    for outputs in (cumulative, deltas, final):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_text_streams_whole_characters_and_is_the_text_of_the_tokens(tokenizer):
    async def scenario(llm):
        llm.tokenizer = tokenizer
        sampled = SamplingParams(max_tokens=100, ignore_eos=True, seed=4)
        return await asyncio.gather(
            *(collect(llm, "Grüße", sampled, output_kind=kind) for kind in ("cumulative", "delta"))
        )

    cumulative, deltas = run_scenario(scenario)
    tokens = cumulative[-1].outputs[0].token_ids
    text = tokenizer.decode([token for token in tokens if token != 259])
    assert len(set(text)) > 10
    assert cumulative[-1].outputs[0].text == text
    assert "".join(output.outputs[0].text for output in deltas) == text
    assert cumulative[-1].prompt == "Grüße"
    assert cumulative[-1].prompt_token_ids == tuple(tokenizer.encode("Grüße"))


def test_every_answer_of_a_request_has_its_own_tokens_and_logprobs(offline):
    params = SamplingParams(n=3, max_tokens=9, ignore_eos=True, seed=2, logprobs=2)
    (truth,) = offline.generate([prompts()[1]], params)

    async def scenario(llm):
        return await asyncio.gather(
            *(collect(llm, prompts()[1], params, output_kind=kind) for kind in ("cumulative", "delta"))
        )

    cumulative, deltas = run_scenario(scenario)
    assert [output.index for output in cumulative[-1].outputs] == [0, 1, 2]
    assert len({output.token_ids for output in truth.outputs}) == 3
    for index, answer in enumerate(truth.outputs):
        answer_output = cumulative[-1].outputs[index]
        assert answer_output.token_ids == answer.token_ids
        assert [one.logprob for one in answer_output.logprobs] == pytest.approx(
            [one.logprob for one in answer.logprobs], abs=1e-4
        )
        parts = [output.outputs[index] for output in deltas]
        assert sum((part.token_ids for part in parts), ()) == answer.token_ids
        logprobs = sum((part.logprobs for part in parts), ())  # computed beside other requests than the first
        assert [one.logprob for one in logprobs] == pytest.approx(
            [one.logprob for one in answer.logprobs], abs=1e-4
        )
        assert all(len(part.logprobs) == len(part.token_ids) for part in parts)


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


def test_a_bad_request_raises_its_own_error_while_others_go_on(expected):
    async def scenario(llm):
        bad = [[3, 260], [], [1] * 128, ["a"], "text"]
        asked = [last(llm, prompt) for prompt in [prompts()[0], *bad, prompts()[1]]]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, *errors, other = run_scenario(scenario)
    assert [str(error) for error in errors[:3]] == [
        "prompt token 1 is 260: must be >= 0 and < 260",
        "an empty prompt",
        "prompt of 128 tokens: max_model_len is 128",
    ]
    assert [type(error) for error in errors] == [ValueError] * 5
    assert "no tokenizer; give token ids" in str(errors[4])
    assert [output.outputs[0].token_ids for output in (first, other)] == expected[:2]


def test_an_id_is_served_once_at_a_time():
    async def scenario(llm):
        running, steps = llm.generate(prompts()[0], LONG, request_id="a"), stepwise(llm)
        await anext(running)
        with pytest.raises(ValueError, match="request_id=a: is in use by an unfinished request"):
            await last(llm, prompts()[1], request_id="a")
        steps.release(ALL)
        numbered = await asyncio.gather(last(llm, prompts()[1]), last(llm, prompts()[2]))
        await running.aclose()
        await until(lambda: llm.num_unfinished == 0)
        return numbered, await last(llm, prompts()[1], request_id="a")

    numbered, again = run_scenario(scenario)
    assert len({output.request_id for output in numbered}) == 2
    assert again.request_id == "a"


def test_what_fails_on_the_device_ends_with_an_output_that_says_so(expected):
    async def scenario(llm):
        runner = llm.engine.runner
        launch, num_launches = runner.launch, 0

        def failing(plan, num_iterations=1):
            nonlocal num_launches
            num_launches += 1
            if num_launches == 4:
                raise RuntimeError("out of memory")
            return launch(plan, num_iterations)

        runner.launch = failing
        return await collect(llm, prompts()[0]), await last(llm, prompts()[1])

    outputs, other = run_scenario(scenario)
    assert outputs[-1].error == "out of memory"
    assert outputs[-1].outputs[0].finish_reason == "error"
    assert outputs[-1].outputs[0].token_ids == expected[0][:3]
    assert other.outputs[0].token_ids == expected[1]


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_waiting": 0}, "max_waiting=0: must be >= 1"),
        ({"on_full": "drop"}, "on_full=drop: must be one of wait, reject"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be >= 1"),
    ],
)
def test_rejects_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_rejects_an_unknown_output_kind():
    async def scenario(llm):
        with pytest.raises(
            ValueError, match="output_kind=text: must be one of cumulative, delta, final_only"
        ):
            await last(llm, prompts()[0], output_kind="text")

    run_scenario(scenario)
