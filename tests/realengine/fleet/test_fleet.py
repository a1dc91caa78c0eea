"""A fleet answers as one engine does, whichever engine serves a request."""

import asyncio
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from policies.admission.queue_bound import QueueBound
from policies.routing.prefix_aware import PrefixIndex
from realengine.fleet.request import RefusedError
from realengine.serving.beams import BeamSearchParams
from realengine.serving.sampling_params import SamplingParams
from tests.realengine.fleet.conftest import LONG, assert_same, last, until
from tests.realengine.serving.async_scenarios import prompts

SHORT = replace(LONG, max_tokens=12)


@pytest.fixture(scope="module")
def served(make_served):
    return make_served(replicas=2)


def sampled(**settings):
    return SamplingParams(max_tokens=12, ignore_eos=True, seed=3, **settings)


@pytest.mark.parametrize(
    "params",
    [
        SHORT,
        sampled(temperature=0.8, presence_penalty=0.5, logprobs=2),
        sampled(temperature=1.0, n=3),
        sampled(temperature=1.0, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=30, stop=("e", "t")),
    ],
    ids=["greedy", "sampled", "samples", "prompt scores", "stop strings"],
)
def test_outputs_are_those_of_one_engine(served, offline, params):
    async def all_of_them():
        return await asyncio.gather(*(last(served.fleet, prompt, params) for prompt in prompts(8)))

    outputs = served.run(all_of_them())
    expected = offline.generate(prompts(8), params)
    for output, wanted in zip(outputs, expected, strict=True):
        assert_same(output, wanted)
        assert output.prompt_token_ids == wanted.prompt_token_ids
        assert output.error is None


def test_a_beam_search_has_the_results_of_one_engine(served, offline):
    search = BeamSearchParams(beam_width=3, max_tokens=6)
    params = search.sampling(served.fleet.architecture.vocab_size, served.fleet.architecture.eos_token_ids)
    output = served.run(last(served.fleet, prompts(1)[0], params, output_kind="final_only"))
    [wanted] = offline.generate([prompts(1)[0]], params)
    assert [each.token_ids for each in output.outputs] == [each.token_ids for each in wanted.outputs]


def test_deltas_join_to_the_output(served, offline):
    async def deltas():
        kinds = served.fleet.generate(prompts(1)[0], SHORT, output_kind="delta")
        return [output async for output in kinds]

    found = served.run(deltas())
    [wanted] = offline.generate([prompts(1)[0]], SHORT)
    assert sum((output.outputs[0].token_ids for output in found), ()) == wanted.outputs[0].token_ids
    assert "".join(output.outputs[0].text for output in found) == wanted.outputs[0].text
    assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]


def test_an_abort_ends_the_request_in_its_engine(served):
    async def aborted():
        task = asyncio.create_task(last(served.fleet, [1, 2, 3], LONG, request_id="a"))
        await until(lambda: any(own.outputs[0].tokens for own in served.fleet._requests.values()))
        await served.fleet.abort("a")
        return await task

    output = served.run(aborted())
    assert output.outputs[0].finish_reason == "aborted"
    assert 0 < len(output.outputs[0].token_ids) < 90


def test_a_reader_that_leaves_aborts_its_request(served):
    async def left():
        async for _ in served.fleet.generate([1, 2, 3], LONG):
            break
        await until(lambda: served.fleet.num_unfinished == 0)

    served.run(left())
    assert all(each.num_outstanding == 0 for each in served.fleet.fleet.replicas)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([1] * 200, {}, "200"),
        ([], {}, "prompt"),
        ([1, 999], {}, "999"),
        ([1], {"priority": "high"}, "priority='high'"),
        ([1], {"lora": "sql"}, "sql"),
    ],
    ids=["long", "empty", "token", "priority", "adapter"],
)
def test_rejects_what_no_engine_can_serve(served, prompt, settings, message):
    with pytest.raises(ValueError, match=message):
        served.run(last(served.fleet, prompt, SHORT, **settings))
    assert served.run(last(served.fleet, [1, 2], SHORT)).finished


def test_a_policy_refuses_what_is_beyond_its_bound(make_served):
    served = make_served(replicas=2, gateway={"admission": QueueBound(max_outstanding=2, per="fleet")})

    async def crowd():
        tasks = [asyncio.create_task(last(served.fleet, prompt, SHORT)) for prompt in prompts(4)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = served.run(crowd())
    assert [isinstance(each, RefusedError) for each in found] == [False, False, True, True]
    assert str(found[2]) == "queue bound of the fleet"
    assert served.run(last(served.fleet, prompts(1)[0], SHORT)).finished


def test_a_request_that_finds_only_full_queues_is_refused(make_served):
    served = make_served(replicas=2, gateway={"max_waiting": 1})

    async def crowd():
        tasks = [asyncio.create_task(last(served.fleet, prompt, SHORT)) for prompt in prompts(4)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = served.run(crowd())
    assert [isinstance(each, RefusedError) for each in found] == [False, False, True, True]
    assert str(found[3]) == "the queue is full (max_waiting=1)"


def test_a_router_sees_what_the_caches_hold(make_served, offline):
    """Each prompt continues one that an engine has served, and goes to that engine, whose cache has it."""
    served = make_served(replicas=2, gateway={"routing": PrefixIndex()})
    first = [[number] * 40 for number in range(1, 5)]

    async def two_turns():
        await asyncio.gather(*(last(served.fleet, prompt, SHORT) for prompt in first))
        where = {tuple(prompt): holder(served, prompt) for prompt in first}
        outputs = []
        for prompt in first:
            outputs.append(await last(served.fleet, [*prompt, 7, 8, 9], SHORT))
        return where, outputs

    where, outputs = served.run(two_turns())
    assert set(where.values()) == {0, 1}
    assert [output.num_cached_tokens for output in outputs] == [32] * 4
    wanted = offline.generate([[*prompt, 7, 8, 9] for prompt in first], SHORT)
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in wanted]


def holder(served, prompt):
    """Returns the index of the only engine whose cache has the first blocks of a prompt."""
    from realengine.serving.content_names import chain_of  # noqa: PLC0415

    link = chain_of(prompt, 16)[1]
    [index] = [each.index for each in served.fleet.fleet.replicas if link in each.cache_view._held]
    return index
