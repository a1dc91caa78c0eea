"""The offline engine with the weights of the asynchronous one, and its tokens."""

from __future__ import annotations

import pytest

from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from tests.realengine.serving.async_scenarios import CONFIG, GREEDY, SETTINGS, prompts


@pytest.fixture(scope="module")
def offline():
    """Returns an LLM with the same weights."""
    return LLM(Architecture.from_hf(CONFIG), **SETTINGS)


@pytest.fixture(scope="module")
def expected(offline):
    """Returns the greedy tokens of every prompt, 12 each."""
    return [output.outputs[0].token_ids for output in offline.generate(prompts(), GREEDY)]
