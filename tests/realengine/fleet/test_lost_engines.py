"""Engines that are killed: every request is answered once, with the tokens of one engine."""

import asyncio

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from realengine.fleet.fleet import State
from realengine.fleet.request import EngineLostError, RefusedError
from realengine.serving.engine_thread import EngineDeadError
from realengine.serving.sampling_params import SamplingParams
from tests.realengine.fleet.conftest import (
    LONG,
    assert_close,
    assert_same,
    kill_when_all_have_tokens,
    last,
    until,
)
from tests.realengine.serving.async_scenarios import prompts

SAMPLED = SamplingParams(
    max_tokens=90, ignore_eos=True, seed=3, presence_penalty=0.5, logprobs=1, stop=("zzzz",)
)


@pytest.fixture(scope="module")
def from_scratch(make_served):
    return make_served(replicas=2)


@pytest.fixture(scope="module")
def after_tokens(make_served):
    return make_served(replicas=2, gateway={"keeps_tokens": True})


async def killed(fleet, params, num_requests=6, index=1, **settings):
    """Returns the outputs or errors of requests in progress while an engine is killed, and all outputs."""
    seen = []

    async def collect(prompt):
        outputs = []
        seen.append(outputs)
        async for output in fleet.generate(prompt, params, **settings):
            outputs.append(output)
        return outputs[-1]

    tasks = [asyncio.create_task(collect(prompt)) for prompt in prompts(num_requests)]
    await kill_when_all_have_tokens(fleet, index, num_requests)
    return await asyncio.gather(*tasks, return_exceptions=True), seen


def test_from_scratch_a_final_output_is_that_of_one_engine(from_scratch, offline):
    fleet = from_scratch.fleet
    num_resends = fleet.log.num_resends
    outputs, seen = from_scratch.run(killed(fleet, LONG, output_kind="final_only"))
    wanted = offline.generate(prompts(6), LONG)
    assert [each.outputs for each in outputs] == [each.outputs for each in wanted]
    assert [len(each) for each in seen] == [1] * 6
    assert fleet.log.num_resends - num_resends == 3


def test_a_killed_engine_starts_again_and_serves(from_scratch, offline):
    fleet, sent = from_scratch.fleet, []
    from_scratch.run(killed(fleet, LONG, output_kind="final_only"))
    assert [each.state for each in fleet.fleet.replicas] == [State.serving] * 2

    async def each_in_turn():
        for prompt in prompts(2):
            task = asyncio.create_task(last(fleet, prompt, LONG))
            await until(lambda: any(each.num_outstanding for each in fleet.fleet.replicas))
            sent.append([each.num_outstanding for each in fleet.fleet.replicas].index(1))
            output = await task
            assert output.outputs == offline.generate([prompt], LONG)[0].outputs

    from_scratch.run(each_in_turn())
    assert sorted(sent) == [0, 1]


def test_from_scratch_a_reader_that_has_seen_tokens_gets_an_error(from_scratch, offline):
    outputs, seen = from_scratch.run(killed(from_scratch.fleet, LONG, output_kind="delta"))
    lost = [isinstance(each, EngineLostError) for each in outputs]
    assert sorted(lost) == [False] * 3 + [True] * 3
    wanted = offline.generate(prompts(6), LONG)
    for pieces, expected in zip(seen, wanted, strict=True):
        tokens = sum((piece.outputs[0].token_ids for piece in pieces), ())
        assert tokens == expected.outputs[0].token_ids[: len(tokens)]


@pytest.mark.parametrize("params", [LONG, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["delta", "cumulative", "final_only"])
def test_with_its_tokens_a_request_goes_on_where_it_was(after_tokens, offline, params, kind):
    """Also draws, penalties, log-probabilities and text go on as in one engine."""
    fleet = after_tokens.fleet
    num_resends = fleet.log.num_resends
    outputs, seen = after_tokens.run(killed(fleet, params, output_kind=kind))
    wanted = offline.generate(prompts(6), params)
    assert fleet.log.num_resends - num_resends == 3
    for output, pieces, expected in zip(outputs, seen, wanted, strict=True):
        [whole] = expected.outputs
        if kind == "delta":
            assert sum((piece.outputs[0].token_ids for piece in pieces), ()) == whole.token_ids
            assert "".join(piece.outputs[0].text for piece in pieces) == whole.text
            logprobs = [each for piece in pieces for each in piece.outputs[0].logprobs or ()]
            assert_close(logprobs, whole.logprobs)
        else:
            assert_same(output, expected)


def test_a_request_that_may_not_be_sent_again_fails(make_served):
    served = make_served(replicas=2, gateway={"max_resends": 0})
    outputs, _ = served.run(killed(served.fleet, LONG, output_kind="final_only"))
    refused = [each for each in outputs if isinstance(each, RefusedError)]
    assert [str(each) for each in refused] == ["its replica crashed"] * 3


def test_without_a_restart_the_last_engine_ends_the_fleet(make_served):
    served = make_served(replicas=1, gateway={"restarts": False})
    outputs, _ = served.run(killed(served.fleet, LONG, num_requests=2, index=0, output_kind="final_only"))
    assert [str(each) for each in outputs] == ["no replica takes requests"] * 2
    with pytest.raises(EngineDeadError, match=r"no engine serves \(engine 0: .* exit code -9\)"):
        served.run(last(served.fleet, [1]))
