"""Lookahead decoding changes no token, and its n-grams are those of the target's own guesses."""

from dataclasses import replace

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.caching.radix import Radix
from policies.scheduling.fcfs import Fcfs
from tests.realengine.speculation.test_lossless import GREEDY, WAYS, prompts, tokens_of
from tests.realengine.test_engine import make

torch.set_num_threads(1)

CONFIG = {"method": "lookahead", "window": 4, "ngram": 4, "guesses": 5}
LONG = replace(GREEDY, max_tokens=60)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"config": "mistral"},
        {"batching": Chunked(max_num_batched_tokens=48), "caching": Radix()},
        {"num_kv_blocks": 24},
        {"num_kv_blocks": 24, "scheduling": Fcfs(preemption_mode="swap")},
        {"max_model_len": 72},
    ],
    ids=["plain", "mistral", "chunks", "tight", "swap", "short context"],
)
def test_no_token_changes(settings, way):
    params = replace(WAYS[way], max_tokens=40)
    plain = make(**settings).generate(prompts(), params)
    llm = make(**settings, speculative_config=CONFIG)
    assert tokens_of(llm.generate(prompts(), params)) == tokens_of(plain)
    llm.engine.core.check_integrity()


def test_an_output_that_repeats_is_guessed():
    """A tiny random model soon repeats its greedy tokens, which the n-grams of its guesses then hold."""
    outputs = make(speculative_config=CONFIG).generate(prompts(), LONG)
    assert tokens_of(outputs) == tokens_of(make().generate(prompts(), LONG))
    accepted = sum(output.drafts.num_accepted_tokens for output in outputs)
    passes = sum(output.drafts.num_drafts for output in outputs)
    assert accepted > 0.3 * passes


@pytest.mark.parametrize("shape", [(1, 2, 1), (7, 3, 2), (2, 5, 6)])
def test_windows_of_any_shape_change_no_token(shape):
    config = {"method": "lookahead"} | dict(zip(("window", "ngram", "guesses"), shape, strict=True))
    outputs = make(speculative_config=config).generate(prompts(), GREEDY)
    assert tokens_of(outputs) == tokens_of(make().generate(prompts(), GREEDY))
