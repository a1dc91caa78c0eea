"""Drafters that run a decoder change no token of an engine's outputs."""

from dataclasses import replace

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.speculation import num_places
from realengine.model.architecture import Architecture
from realengine.model.kv_cache import KvCache
from realengine.serving.sampling_params import SamplingParams
from realengine.speculation.drafters import draft_model
from tests.realengine.adapters import random_adapter
from tests.realengine.small_models import CONFIGS, make, prompts, tokens_of

torch.set_num_threads(1)

TARGET = Architecture.from_hf(CONFIGS["llama"])
SMALL = replace(TARGET, num_layers=1, hidden_size=32, num_heads=4, intermediate_size=48)
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_k=30, max_tokens=14, ignore_eos=True, seed=3)
DRAFTS = {
    "equal": {"method": "draft_model", "model": TARGET},
    "small": {"method": "draft_model", "model": SMALL},
    "window": {"method": "draft_model", "model": replace(SMALL, model_type="mistral", sliding_window=5)},
    "skipping": {"method": "self_speculative"},
    "all_layers": {"method": "self_speculative", "skipped_layers": []},
}
TREES = {
    "tree": {"method": "specinfer_tree", "model": TARGET, "widths": [2, 2, 1]},
    "late_fork": {"method": "specinfer_tree", "model": SMALL, "widths": [1, 1, 3, 1]},
    "two_models": {"method": "specinfer_tree", "model": [SMALL, TARGET], "widths": [2, 1, 1]},
}
PERFECT = ("equal", "all_layers", "tree", "two_models")


@pytest.fixture(scope="module")
def plain():
    """Returns a function that gives the tokens of an engine without drafts."""
    known = {}

    def of(params):
        if params not in known:
            known[params] = tokens_of(make().generate(prompts(), params))
        return known[params]

    return of


def check(llm, expected, params=GREEDY, *, is_perfect=False):
    outputs = llm.generate(prompts(), params)
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert tokens_of(outputs) == expected
    counts = [output.drafts for output in outputs]
    num_drafted = sum(each.num_draft_tokens for each in counts)
    num_accepted = sum(each.num_accepted_tokens for each in counts)
    assert num_drafted
    if is_perfect:
        depth = num_places(llm.engine.core.drafts.speculation.proposer)
        assert num_accepted >= 0.95 * depth * sum(each.num_drafts for each in counts)
    llm.engine.core.block_pool.check_integrity([])


@pytest.mark.sampled(slow=8)
@pytest.mark.parametrize(
    "num_tokens", [1, 3, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5, 6, 7))]
)
@pytest.mark.parametrize("draft", DRAFTS)
def test_chains_change_no_token(draft, num_tokens, plain):
    llm = make(speculative_config=DRAFTS[draft] | {"num_speculative_tokens": num_tokens})
    check(llm, plain(GREEDY), is_perfect=draft in PERFECT)


@pytest.mark.parametrize("draft", TREES)
def test_trees_change_no_token(draft, plain):
    check(make(speculative_config=TREES[draft]), plain(GREEDY), is_perfect=draft in PERFECT)


@pytest.mark.sampled(fast=8, slow=24)
@pytest.mark.parametrize(
    "settings",
    [
        {"caching": PrefixCaching(block_size=4)},
        {"caching": Radix()},
        {"batching": Chunked(max_num_batched_tokens=24)},
        {"num_kv_blocks": 9},
        {"num_kv_blocks": 9, "swap_space_gib": 0.01},
        {"kv_cache_dtype": "int8"},
        {"max_model_len": 60},
        {"overlap": True},
        {"overlap": True, "num_kv_blocks": 9, "caching": PrefixCaching()},
    ],
    ids=["prefix", "radix", "chunks", "recompute", "swap", "int8_kv", "short", "overlap", "overlap_tight"],
)
@pytest.mark.parametrize(
    "draft",
    [
        *("small", "skipping", "late_fork"),
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("equal", "window", "all_layers", "tree", "two_models")
        ),
    ],
)
def test_outputs_do_not_depend_on_batches_and_memory(draft, settings, plain):
    config = (DRAFTS | TREES)[draft]
    if draft in DRAFTS:
        config = config | {"num_speculative_tokens": 3}
    expected = plain(GREEDY)
    if "kv_cache_dtype" in settings:
        expected = tokens_of(make(**settings).generate(prompts(), GREEDY))
    check(make(**settings, speculative_config=config), expected, is_perfect=draft in ("equal", "all_layers"))


@pytest.mark.parametrize("draft", [*DRAFTS, *TREES])
def test_sampled_outputs_are_those_without_drafts(draft, plain):
    config = (DRAFTS | TREES)[draft]
    if draft in DRAFTS:
        config = config | {"num_speculative_tokens": 4}
    check(make(speculative_config=config), plain(SAMPLED), SAMPLED)


@pytest.mark.parametrize("draft", ["equal", "skipping"])
def test_drawn_drafts_change_no_greedy_token(draft, plain):
    config = DRAFTS[draft] | {"num_speculative_tokens": 4, "draft_sample_method": "probabilistic"}
    check(make(speculative_config=config), plain(GREEDY), is_perfect=draft in PERFECT)


def test_two_ranks_divide_a_draft_or_have_all_of_it():
    """The second draft has 3 heads, which two ranks cannot share, so that each computes it as a whole."""
    even = replace(SMALL, vocab_size=98)
    odd = replace(even, num_heads=3, num_kv_heads=3, intermediate_size=33)
    config = {"method": "specinfer_tree", "model": [even, odd], "widths": [2, 1, 1]}
    one = make("even", speculative_config=config)
    two = make("even", speculative_config=config, tensor_parallel_size=2)
    wanted, found = (llm.generate(prompts(), GREEDY) for llm in (one, two))
    assert tokens_of(found) == tokens_of(wanted) == tokens_of(make("even").generate(prompts(), GREEDY))
    assert [output.drafts for output in found] == [output.drafts for output in wanted]


@pytest.mark.parametrize("draft", ["equal", "skipping", "tree"])
def test_drafts_without_adapters_change_no_token_of_requests_with_one(draft):
    adapters = {name: random_adapter(TARGET, 4, seed=seed, scaling=40.0) for seed, name in enumerate("ab")}
    names = [None, "a", "b", "a", None, "b", "a", "a", "b", None, "b", "a"]
    config = (DRAFTS | TREES)[draft] | ({"num_speculative_tokens": 3} if draft in DRAFTS else {})
    wanted = make(lora_adapters=adapters).generate(prompts(), GREEDY, names)
    llm = make(lora_adapters=adapters, speculative_config=config)
    assert tokens_of(llm.generate(prompts(), GREEDY, names)) == tokens_of(wanted)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model": replace(SMALL, vocab_size=96)},
            "model=the architecture: vocab_size=96: must be that of the target, 97",
        ),
        (
            {"model": replace(SMALL, max_position_embeddings=64)},
            "max_position_embeddings=64: must be at least max_model_len=128; set max_model_len to at most 64",
        ),
        ({"model": [SMALL, SMALL]}, "method=draft_model drafts with one model, not 2"),
        ({"model": "/nowhere"}, "model=/nowhere: .*"),
        (
            {"method": "specinfer_tree", "model": [SMALL, SMALL], "widths": [2, 2]},
            r"widths=\[2, 2\]: 2 models draft one branch each, so widths must be \[2, 1, ...\]",
        ),
        (
            {**TREES["tree"], "draft_sample_method": "probabilistic"},
            "draft_sample_method=probabilistic: method=specinfer_tree drafts the likeliest tokens only",
        ),
        (
            {"method": "self_speculative", "skipped_layers": [2]},
            r"skipped_layers=\[2\]: the target has no layer 2; choose from 0 to 1",
        ),
    ],
)
def test_rejects_drafts_that_do_not_fit_the_target(config, message):
    if config.get("method") != "specinfer_tree":
        config = config | {"num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=message):
        make(speculative_config=config)


def test_says_how_many_blocks_fit_if_there_is_no_memory_for_the_kv_of_a_draft(monkeypatch):
    class Full(KvCache):
        def __init__(self, *args):
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(draft_model, "KvCache", Full)
    message = r"num_kv_blocks=200: .* beside the weights of the model and of its draft; \d+ blocks would fit"
    with pytest.raises(ValueError, match=message):
        make(speculative_config=DRAFTS["small"] | {"num_speculative_tokens": 2})


def test_blocks_are_counted_with_the_kv_of_the_draft():
    config = DRAFTS["equal"] | {"num_speculative_tokens": 2}
    alone, drafted = make(num_kv_blocks=None), make(num_kv_blocks=None, speculative_config=config)
    num_alone, num_drafted = (llm.engine.core.block_pool.num_blocks for llm in (alone, drafted))
    assert num_drafted == pytest.approx(num_alone / 2, abs=1)
