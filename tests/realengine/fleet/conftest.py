"""Fleets of engines with a tiny random model, each in an event loop of its own."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("tokenizers", reason="text needs the package tokenizers")

import torch

from realengine.fleet.async_fleet import AsyncFleet, GatewaySettings
from realengine.fleet.fleet import State
from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from realengine.serving.model import Model
from realengine.serving.sampling_params import SamplingParams
from realengine.serving.tokenizer import byte_tokenizer
from tests.realengine.serving.async_scenarios import CONFIG

torch.set_num_threads(1)

SETTINGS = {"device": "cpu", "seed": 1, "num_kv_blocks": 100, "max_num_seqs": 4}
LONG = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)


def tiny_model():
    """Returns a model of random weights whose tokens are bytes."""
    architecture = Architecture.from_hf(CONFIG)
    return Model(architecture, None, byte_tokenizer(architecture.vocab_size, architecture.eos_token_ids))


class Served:
    """A fleet and the event loop in which it runs."""

    def __init__(self, **settings):
        gateway = GatewaySettings(**settings.pop("gateway", {}))
        self.loop = asyncio.new_event_loop()
        self.fleet = AsyncFleet(tiny_model(), gateway=gateway, **(SETTINGS | settings))

    def run(self, scenario):
        """Runs a coroutine; then nothing is left in the engines, and all of them serve."""
        result = self.loop.run_until_complete(asyncio.wait_for(self._whole(scenario), 60))
        assert not self.fleet.gateway.attempts
        assert not self.fleet.num_unfinished
        for replica in self.fleet.fleet.replicas:
            counts = replica.num_outstanding, replica.num_outstanding_tokens, replica.num_queued_tokens
            assert counts == (0, 0, 0)
        return result

    async def _whole(self, scenario):
        result = await scenario
        fleet = self.fleet.fleet
        await until(lambda: not any(each.num_outstanding for each in fleet.replicas))
        await until(lambda: not fleet.of(State.starting))
        return result

    def close(self):
        """Ends the engines; a second call does nothing."""
        if self.loop.is_closed():
            return
        self.loop.run_until_complete(asyncio.to_thread(self.fleet.shutdown))
        self.loop.close()


def assert_same(output, wanted):
    """Asserts equal outputs; log-probabilities of tokens in other batches differ in the last digits."""
    assert len(output.outputs) == len(wanted.outputs)
    for each, other in zip(output.outputs, wanted.outputs, strict=True):
        names = ("token_ids", "text", "finish_reason", "stop_reason", "index")
        assert [getattr(each, name) for name in names] == [getattr(other, name) for name in names]
        assert_close(each.logprobs, other.logprobs)
    assert_close(output.prompt_logprobs, wanted.prompt_logprobs)


def assert_close(found, wanted):
    """Asserts equal log-probabilities, except for rounding."""
    values = ([each and each.logprob for each in list_or_none or ()] for list_or_none in (found, wanted))
    one, other = ([value for value in all_of if value is not None] for all_of in values)
    assert one == pytest.approx(other, abs=1e-4)


async def until(holds):
    """Waits until something holds."""
    while not holds():
        await asyncio.sleep(0.002)


async def last(fleet, prompt, params=LONG, **settings):
    """Returns the last output of a request."""
    outputs = [output async for output in fleet.generate(prompt, params, **settings)]
    return outputs[-1]


async def kill_when_all_have_tokens(fleet, index, num_requests):
    """Kills an engine once it and the others have produced tokens for every request."""
    requests = fleet._requests
    await until(lambda: len(requests) == num_requests)
    await until(lambda: all(own.outputs[0].tokens for own in requests.values()))
    process = fleet.fleet.replicas[index].process.process
    os.kill(process.pid, signal.SIGKILL)
    return process.pid


@pytest.fixture(scope="package")
def offline():
    """Returns one engine with the same model."""
    return LLM(tiny_model(), **SETTINGS)


@pytest.fixture(scope="module")
def make_served():
    """Returns a maker of started fleets."""
    made = []

    def make(**settings):
        served = Served(**settings)
        made.append(served)
        served.loop.run_until_complete(served.fleet.start())
        return served

    yield make
    for served in made:
        served.close()
