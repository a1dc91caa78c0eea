"""The real engine with a tiny random model behind the HTTP application, in the test's own process."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("tokenizers", reason="text needs the package tokenizers")

import torch
from aiohttp.test_utils import TestClient, TestServer

from experiments.serve.engine.backend import EngineBackend
from experiments.serve.engine.model_to_serve import ModelToServe
from experiments.serve.engine.recorder import ServingRecorder
from experiments.serve.http.app import make_app
from experiments.serve.http.control import SleepMode, add_adapter_routes, add_control_routes
from realengine.model.architecture import Architecture
from realengine.serving.async_llm import AsyncLLM
from realengine.serving.llm import LLM
from realengine.serving.model import Model
from realengine.serving.tokenizer import byte_tokenizer
from tests.experiments.serve.conftest import Client

torch.set_num_threads(1)

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 299,
}
SETTINGS = {"device": "cpu", "seed": 1, "num_kv_blocks": 100, "max_num_seqs": 4}


def tiny_model(**changes):
    """Returns a model of random weights whose tokens are bytes."""
    architecture = replace(Architecture.from_hf(CONFIG), **changes)
    tokenizer = byte_tokenizer(architecture.vocab_size, architecture.eos_token_ids)
    return Model(architecture, None, tokenizer)


@asynccontextmanager
async def engine_serving(adapters=(), model=None, **settings):
    """Yields a client of an engine that is warm; its recorder observes it. `client.fleet` is the back end."""
    model = model or tiny_model()

    def load():
        return AsyncLLM(model, **(SETTINGS | settings))

    served = ModelToServe("tiny", model, {})
    length = model.architecture.max_position_embeddings
    backend = EngineBackend(served, load, max_model_len=length, adapters=adapters)
    app = make_app(backend)
    add_adapter_routes(app, backend)
    if settings.get("enable_sleep_mode"):
        clear, control = backend.clear_prefix_cache, SleepMode(backend)
        add_control_routes(app, control, clear, config={})
    async with TestClient(TestServer(app)) as client:
        llm = await backend.start()
        llm.engine.observer = recorder = ServingRecorder(llm.engine, 1 << 20)
        backend.open()
        found = Client(client, backend)
        found.llm, found.recorder = llm, recorder
        try:
            yield found
        finally:
            await backend.stop()


@pytest.fixture
def engine_served():
    """Runs a coroutine function with a client: `engine_served(test, **settings)`."""

    def run(test, **settings):
        async def whole():
            async with engine_serving(**settings) as client:
                return await asyncio.wait_for(test(client), 60)

        return asyncio.run(whole())

    return run


@pytest.fixture(scope="package")
def offline():
    """Returns the same engine without a server."""
    return LLM(tiny_model(), **SETTINGS)
