"""An engine that speculates behind the API: proposers that fail end their own request, and others go on."""

import asyncio
import threading

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("aiohttp")

from realengine.model.architecture import Architecture
from realengine.serving.async_llm import AsyncLLM
from tests.experiments.serve.engine.conftest import CONFIG, tiny_model
from tests.experiments.serve.engine.test_backend import GREEDY, PARAMS, PATH, prompts

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
BAD = [7, 7, 7]
"""The prompt for which a drafter fails."""


class Drafts:
    """Drafts tokens that are wrong, and fails for one prompt."""

    def __init__(self, fail):
        self._fail = fail

    def draft(self, request_id, prompt, output, num_tokens):
        return self._fail() if prompt == BAD else [5] * num_tokens

    def forget(self, request_id, output):
        pass


def raising():
    raise KeyError("no such text")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["raises", "hangs"])
def test_a_proposer_that_fails_ends_its_request_with_the_reason_and_others_go_on(
    engine_served, offline, way, stream
):
    released = threading.Event()
    fail, reason = (
        (raising, "Drafts raised KeyError: 'no such text'")
        if way == "raises"
        else (released.wait, "Drafts has not returned within 3 s (host_timeout_s)")
    )
    config = NGRAM | {"host": Drafts(fail), "host_timeout_s": 3.0 if way == "hangs" else 600.0}

    async def test(client):
        bad, *others = await asyncio.gather(
            failing(client), *(client.post(PATH, GREEDY | {"prompt": prompt}) for prompt in prompts())
        )
        later = await client.post(PATH, GREEDY | {"prompt": prompts()[0]})
        return bad, [*others, later]

    async def failing(client):
        return await client.post(PATH, GREEDY | {"prompt": BAD, "stream": stream})

    try:
        (status, bad), others = engine_served(test, speculative_config=config)
    finally:
        released.set()
    assert status == 500  # no token has been streamed yet
    assert bad["error"]["message"] == reason
    expected = [output.outputs[0].token_ids for output in offline.generate(prompts(), PARAMS)]
    for (status, whole), tokens in zip(others, [*expected, expected[0]], strict=True):
        assert status == 200
        assert tuple(whole["choices"][0]["token_ids"]) == tokens


def test_memory_that_has_no_room_for_the_draft_s_kv_is_named():
    draft = Architecture.from_hf(CONFIG)
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=r"num_kv_blocks=1000000000000: the CPU has no memory .* draft"):
        AsyncLLM(tiny_model(), device="cpu", num_kv_blocks=10**12, speculative_config=config)
