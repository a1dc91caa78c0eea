"""An engine that speculates behind the API: proposers that fail end their own request, and others go on."""

import asyncio
import json
import threading

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("aiohttp")
pytest.importorskip("safetensors.torch", reason="reads the package safetensors")

import torch
from safetensors.torch import save_file

from experiments.serve.driver import ServeJob
from realengine.serving.async_llm import AsyncLLM
from realengine.serving.llm import LLM
from sim.settings.errors import ConfigError
from tests.experiments.serve.engine.conftest import CONFIG, tiny_model
from tests.experiments.serve.engine.test_backend import GREEDY, PARAMS, PATH, prompts
from tests.experiments.serve.engine.test_job import TINY, prepared
from tests.realengine.checkpoints import LLAMA, random_checkpoint

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


def draft_folder(folder, **changes):
    """Writes a tiny draft model with random weights; changes: of its config."""
    config = LLAMA | {"max_position_embeddings": 4096} | changes
    save_file(random_checkpoint(config), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def heads_folder(folder):
    """Writes a Medusa head for a target whose hidden size is 16."""
    shapes = {"0.0.linear.weight": (16, 16), "0.0.linear.bias": (16,), "0.1.weight": (300, 16)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


BAD_DRAFTS = {
    "no memory": (
        lambda folder, vocab: draft_folder(folder, vocab_size=vocab),
        {"method": "draft_model", "num_speculative_tokens": 2},
        r"num_kv_blocks=1000000000000: the CPU has no memory for .* beside the weights of the model and of "
        r"its draft; [\d,]+ blocks would fit",
    ),
    "another vocabulary": (
        lambda folder, _: draft_folder(folder, vocab_size=41),
        {"method": "draft_model", "num_speculative_tokens": 2},
        r"speculative_config: model=.*: vocab_size=41: must be that of the target, \d+, because",
    ),
    "heads of another size": (
        lambda folder, _: heads_folder(folder),
        {"method": "medusa", "num_speculative_tokens": 1},
        r"speculative_config: model=.*: .*0\.0\.linear\.weight is \[16, 16\], must be \[\d+, \d+\]",
    ),
    "too many tokens": (
        lambda folder, vocab: draft_folder(folder, vocab_size=vocab),
        {"method": "draft_model", "num_speculative_tokens": 129},
        r"num_speculative_tokens=129: must be 1 to 128",
    ),
}
LARGEST = 10**12


@pytest.mark.parametrize("kind", BAD_DRAFTS)
@pytest.mark.parametrize("engine", [LLM, AsyncLLM])
def test_a_draft_that_cannot_be_is_refused_in_one_sentence(tmp_path, engine, kind):
    write, config, message = BAD_DRAFTS[kind]
    config = config | {"model": str(write(tmp_path, CONFIG["vocab_size"]))}
    num_kv_blocks = LARGEST if kind == "no memory" else 100
    with pytest.raises(ValueError, match=message) as raised:
        engine(tiny_model(), device="cpu", num_kv_blocks=num_kv_blocks, speculative_config=config)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", BAD_DRAFTS)
def test_a_server_with_a_draft_that_cannot_be_ends_with_one_sentence(tmp_path, kind):
    write, config, message = BAD_DRAFTS[kind]
    given = ", ".join(f"{key}: {value}" for key, value in (config | {"model": write(tmp_path, 8192)}).items())
    words = [word for word in TINY if kind != "no memory" or not word.startswith("engine.num_kv_blocks=")]
    words += [f"engine.num_kv_blocks={LARGEST}"] if kind == "no memory" else []
    with pytest.raises(ConfigError, match=message) as raised:
        ServeJob(prepared(*words, "port=0", f"serve.engine.speculative_config={{{given}}}")).run(tmp_path)
    assert "\n" not in str(raised.value)
