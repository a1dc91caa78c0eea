"""Engines that do not start, engines that differ, and fleets that sleep."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from policies.prediction.oracles import OracleWithNoise
from policies.routing.load_balancing import Weighted
from realengine.fleet.async_fleet import AsyncFleet, GatewaySettings
from realengine.fleet.fleet import State
from realengine.fleet.process import EngineOfFleet
from realengine.serving.engine_thread import EngineDeadError
from realengine.serving.model import Model
from realengine.settings import EngineSettings
from tests.realengine.fleet.conftest import LONG, SETTINGS, assert_same, last, tiny_model, until
from tests.realengine.serving.async_scenarios import prompts

SHORT = replace(LONG, max_tokens=12)


def fleet_of(*settings, **gateway):
    model = tiny_model()
    engines = [EngineOfFleet(model, EngineSettings(**(SETTINGS | each))) for each in settings]
    return AsyncFleet(model, engines=engines, gateway=GatewaySettings(**gateway))


def started(fleet):
    async def start():
        try:
            await fleet.start()
        finally:
            assert all(each.process is None for each in fleet.fleet.replicas) or not fleet.fleet.of(
                State.gone
            )

    return asyncio.run(start())


def test_an_engine_that_cannot_be_built_is_named_with_its_reason():
    with pytest.raises(RuntimeError, match=r"engine 1 cannot start: ValueError: .*max_model_len"):
        started(fleet_of({}, {"max_model_len": 1000}))


def test_an_engine_that_does_not_start_in_time_is_named():
    with pytest.raises(RuntimeError, match=r"engine \d cannot start: it has not started within 0.001 s"):
        started(fleet_of({}, {}, start_timeout_s=0.001))


def test_an_engine_that_is_killed_while_it_starts_is_named():
    async def start():
        fleet = fleet_of({}, {})
        starting = asyncio.create_task(fleet.start())
        await until(lambda: fleet.fleet.replicas[1].process is not None)
        os.kill(fleet.fleet.replicas[1].process.process.pid, signal.SIGKILL)
        await starting

    with pytest.raises(RuntimeError, match="engine 1 cannot start: its process has ended with exit code -9"):
        asyncio.run(start())


def test_rejects_engines_with_different_models():
    model = tiny_model()
    other = Model(replace(model.architecture, num_layers=2), None, model.tokenizer)
    engines = [EngineOfFleet(each, EngineSettings(**SETTINGS)) for each in (model, other)]
    message = r"engines\[1\].model=llama with 2 layers of 32: must be llama with 1 layers of 32"
    with pytest.raises(ValueError, match=message):
        AsyncFleet(model, engines=engines)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 0}, "replicas=0: must be >= 1"),
        ({"gateway": GatewaySettings(max_resends=-1)}, "max_resends=-1: must be >= 0"),
        ({"gateway": GatewaySettings(start_timeout_s=0)}, "start_timeout_s=0: must be a finite number > 0 s"),
        ({"gateway": GatewaySettings(routing=Weighted(weights=(1.0, 2.0)))}, "weights"),
        ({"gateway": GatewaySettings(prediction=OracleWithNoise())}, "uses the true output lengths"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
    ],
    ids=lambda each: "",
)
def test_rejects_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        AsyncFleet(tiny_model(), **(SETTINGS | settings))


def test_engines_of_several_kinds_serve_one_model(offline):
    """Kinds differ in memory, slots and block size; an output is the same in each."""

    async def serve():
        kinds = {"num_kv_blocks": 30, "max_num_seqs": 2}, {"max_num_seqs": 8}
        fleet = fleet_of(*kinds)
        async with fleet:
            sizes = [each.num_kv_tokens for each in fleet.fleet.replicas]
            return sizes, await asyncio.gather(*(last(fleet, prompt, SHORT) for prompt in prompts(8)))

    sizes, outputs = asyncio.run(serve())
    assert sizes == [30 * 16, 100 * 16]
    for output, wanted in zip(outputs, offline.generate(prompts(8), SHORT), strict=True):
        assert_same(output, wanted)


def test_a_sleeping_fleet_serves_after_its_wake_up(make_served, offline):
    served = make_served(replicas=2, enable_sleep_mode=True)
    fleet = served.fleet

    async def sleep_and_wake():
        running = asyncio.create_task(last(fleet, prompts(1)[0], LONG))
        await until(lambda: fleet.num_unfinished)
        await fleet.sleep(level=2, mode="wait")
        assert fleet.is_sleeping
        assert [each.state for each in fleet.fleet.replicas] == [State.asleep] * 2
        waiting = asyncio.create_task(last(fleet, prompts(2)[1], LONG))
        await until(lambda: fleet.num_unfinished)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await fleet.wake_up()
        return await running, await waiting

    outputs = served.run(sleep_and_wake())
    for output, wanted in zip(outputs, offline.generate(prompts(2), LONG), strict=True):
        assert_same(output, wanted)


def test_a_fleet_without_sleep_mode_says_so(make_served):
    served = make_served(replicas=1)
    with pytest.raises(ValueError, match="enable_sleep_mode=True"):
        served.run(served.fleet.sleep())


def test_a_stop_ends_the_processes_and_the_requests(make_served):
    served = make_served(replicas=2)
    fleet = served.fleet
    processes = [each.process.process for each in fleet.fleet.replicas]

    async def stop():
        tasks = [asyncio.create_task(last(fleet, prompt, LONG)) for prompt in prompts(4)]
        await until(lambda: fleet.num_unfinished == 4)
        await asyncio.to_thread(fleet.shutdown)
        return await asyncio.gather(*tasks, return_exceptions=True)

    errors = served.loop.run_until_complete(asyncio.wait_for(stop(), 60))
    assert all(isinstance(error, EngineDeadError) for error in errors)
    assert [process.exitcode for process in processes] == [0, 0]
    with pytest.raises(EngineDeadError, match="the fleet was shut down"):
        fleet.check_health()
