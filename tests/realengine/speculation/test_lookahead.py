"""Lookahead decoding changes no token, and its n-grams are those of the target's own guesses."""

from dataclasses import replace

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.caching.radix import Radix
from policies.scheduling.fcfs import Fcfs
from tests.realengine.small_models import make
from tests.realengine.speculation.test_lossless import GREEDY, WAYS, plain_outputs, prompts, tokens_of

torch.set_num_threads(1)

CONFIG = {"method": "lookahead", "window": 4, "ngram": 4, "guesses": 5}
LONG = replace(GREEDY, max_tokens=60)


@pytest.mark.sampled(fast=4, slow=8)
@pytest.mark.parametrize("way", ["greedy", "sampled", pytest.param("penalised", marks=pytest.mark.slow)])
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
    plain = plain_outputs(params, **settings)
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


@pytest.mark.parametrize("window", [3, 12])
def test_a_window_fits_behind_a_prompt_of_one_token(window):
    config = {"method": "lookahead", "window": window, "ngram": 5, "guesses": 2}
    settings = {"caching": Radix(block_size=1)}
    outputs = make(**settings, speculative_config=config).generate([[3], [4]], GREEDY)
    assert tokens_of(outputs) == tokens_of(make(**settings).generate([[3], [4]], GREEDY))
    assert all(output.drafts for output in outputs)


def test_a_context_without_room_for_a_window_is_refused():
    with pytest.raises(ValueError, match="ngram=4: a window needs KV of 4 tokens, it holds 3 of a sequence"):
        make(speculative_config=CONFIG, max_model_len=3)


def test_n_grams_of_an_earlier_sequence_of_the_slot_are_forgotten():
    """One slot serves one request after the other: what a request accepts depends on itself only."""

    def counts_of(asked):
        return make(max_num_seqs=1, speculative_config=CONFIG).generate(asked, LONG)[-1].drafts

    short, long = prompts()[0], prompts()[5] + prompts()[2]
    assert len(long) > len(short) + LONG.max_tokens  # a newest position alone does not tell them apart
    assert counts_of([short, long]) == counts_of([long])
