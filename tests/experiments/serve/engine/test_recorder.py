"""Records of a live session of the engine, in the form that all reports read."""

import asyncio

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("aiohttp")

from experiments.serve.engine.recorder import ServingRecorder
from realengine.serving.sampling_params import SamplingParams
from sim.metrics.output import check_conservation
from sim.metrics.token_times import token_times

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


def recorded(engine_served, max_bytes=1 << 20, **settings):
    """Returns the records of ten requests, one of which is aborted, and the outputs of the others."""

    async def test(client):
        llm = client.llm
        llm.engine.observer = recorder = ServingRecorder(llm.engine, max_bytes)

        async def last(i):
            prompt = [7] * 20 + list(range(i, i + 10 + i))
            params = SamplingParams(max_tokens=8 + i, ignore_eos=True)
            async for output in llm.generate(prompt, params):
                if i == 9 and len(output.outputs[0].token_ids) > 2:
                    break
            return len(output.outputs[0].token_ids)

        lengths = await asyncio.gather(*map(last, range(10)))
        for _ in range(60_000):
            if not llm.num_unfinished:
                break
            await asyncio.sleep(0.01)
        return recorder, lengths

    recorder, lengths = engine_served(test, **settings)
    return recorder, recorder.records(), lengths


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": True},
        {"max_iterations": 3},
        {"num_kv_blocks": 12},
        {"speculative_config": NGRAM},
        {"speculative_config": NGRAM, "overlap": True},
    ],
    ids=lambda settings: ",".join(settings) or "plain",
)
def test_tables_agree_with_what_the_clients_got(engine_served, settings):
    _, records, lengths = recorded(engine_served, **settings)
    counts = check_conservation(records)
    assert (counts["finished"], counts["aborted"]) == (9, 1)
    requests = records.requests
    assert requests["output_tokens"].tolist()[:9] == lengths[:9]
    assert requests["prompt_tokens"].tolist() == [30 + i for i in range(10)]
    assert (requests["cached_tokens"] > 0).any()
    iterations = records.iterations
    ends = (iterations["start_s"] + iterations["duration_s"]).to_numpy()
    assert (iterations["duration_s"] > 0).all()
    assert (iterations["start_s"].to_numpy()[1:] >= ends[:-1] - 1e-9).all()
    computed = int((iterations["prefill_tokens"]).sum())
    assert computed >= int((requests["prompt_tokens"] - requests["cached_tokens"]).sum())
    times = token_times(requests, iterations, records.own_gaps)
    assert times.num_tokens.tolist() == requests["output_tokens"].tolist()
    if not settings:  # every token comes at the end of an iteration
        distance = np.abs(times.time_s[:, None] - ends).min(axis=1)
        assert distance.max() < 1e-6


def test_the_memory_is_bounded(engine_served):
    recorder, records, lengths = recorded(engine_served, max_bytes=6000)
    assert recorder.full_s is not None
    assert records.end_s == recorder.full_s
    assert records.requests["output_tokens"].sum() < sum(lengths)
    check_conservation(records)
