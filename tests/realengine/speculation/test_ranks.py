"""Two ranks (gloo) give the tokens of one rank without drafts, with every way to draft."""

import gc
from dataclasses import replace

import pytest
import torch

from tests.realengine.small_models import make
from tests.realengine.speculation.methods import DRAFTERS
from tests.realengine.speculation.test_graphs import WAYS
from tests.realengine.speculation.test_lossless import prompts, tokens_of

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def freed():
    """Frees the engine of the test before, whose ranks end with it."""
    gc.collect()


@pytest.mark.sampled(slow=8)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["greedy", "sampled"])
@pytest.mark.parametrize("method", DRAFTERS)
def test_two_ranks_change_no_token(method, way):
    config = dict(DRAFTERS[method])
    if "model" in config:
        config["model"] = replace(config["model"], vocab_size=98)  # what two ranks can share
    plain = make("even").generate(prompts(), WAYS[way])
    llm = make("even", tensor_parallel_size=2, speculative_config=config)
    found = llm.generate(prompts(), WAYS[way])
    assert tokens_of(found) == tokens_of(plain)
    assert sum(output.drafts.num_draft_tokens for output in found if output.drafts) > 0
    llm.engine.core.check_integrity()
