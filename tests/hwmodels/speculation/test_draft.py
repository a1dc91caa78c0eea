"""Tests of what drafts store: published parameters, devices that share them, refused settings."""

from dataclasses import replace

import pytest

from hwmodels.iterations.layout import ParallelLayout
from hwmodels.speculation.draft import HeadDraft, HostDraft, LayerDraft, ModelDraft, PassDraft, SkipDraft

ONE, TWO = ParallelLayout(), ParallelLayout(tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("draft", "target", "billions"),
    [
        (LayerDraft(kind="eagle"), "llama3_1_8b", 0.25),  # EAGLE, table of its repository
        (LayerDraft(kind="eagle"), "llama2_70b", 0.99),
        (LayerDraft(kind="mtp"), "deepseek_r1", 11.5),  # DeepSeek-V3, README_WEIGHTS: the MTP module alone
    ],
)
def test_layers_have_the_published_numbers_of_parameters(models, draft, target, billions):
    """Embedding table and LM head are the target's and not counted; weights of one byte count themselves."""
    model = models[target]
    element_bytes = {"fp8_block": 1.0}.get(model.weights, 2.0)
    stored = draft.weight_bytes(model, ONE) / element_bytes
    assert stored == pytest.approx(1e9 * billions, rel=0.02)


def test_eagle3_reads_three_hidden_states_and_has_a_small_head(models):
    """Beside EAGLE's layer: 3 hidden to hidden, twice the input of queries, keys, values, 32,000 tokens."""
    model, hidden = models["llama3_1_8b"], 4096
    eagle = LayerDraft(kind="eagle").weight_bytes(model, ONE)
    eagle3 = LayerDraft(kind="eagle3", vocab_size=32_000).weight_bytes(model, ONE)
    assert eagle3 - eagle == 2 * hidden * (3 * hidden - 2 * hidden + 6144 + 32_000)


def test_medusa_heads_are_a_residual_layer_and_an_lm_head_each(models):
    """Medusa on Vicuna-7B: 4 heads of 4,096 x (4,096 + 32,000) weights and a bias each."""
    stored = HeadDraft(num_heads=4).weight_bytes(models["llama2_7b"], ONE)
    assert stored == 2 * 4 * (4096 * (4096 + 32_000) + 4096)
    halves = HeadDraft(num_heads=4).weight_bytes(models["llama2_7b"], TWO)
    assert stored - halves == 2 * 4 * 4096 * 16_000


def test_a_small_model_is_cut_over_the_targets_devices_or_not_at_all(models):
    target, small = models["llama3_1_70b"], models["llama3_2_1b"]
    whole, cut = ModelDraft(model=small, tensor_parallel_size=1), ModelDraft(model=small)
    for draft, ranks in ((whole, 1), (cut, 2)):
        draft.check(target, TWO)
        assert draft.weight_bytes(target, TWO) == small.weight_bytes_per_rank(ranks)
        assert draft.kv_bytes_per_token(target, TWO) == small.kv_bytes_per_token(ranks)


def test_layers_of_their_own_have_kv_and_kept_layers_have_not(models):
    model = models["llama3_1_8b"]
    assert LayerDraft(num_layers=2).kv_bytes_per_token(model, ONE) == 2 * model.kv_bytes_per_token() / 32
    for draft in (SkipDraft(num_layers=8), HeadDraft(), HostDraft(), PassDraft(extra_tokens=60)):
        draft.check(model, ONE)
        assert draft.kv_bytes_per_token(model, ONE) == 0
    for draft in (SkipDraft(num_layers=8), HostDraft(), PassDraft(extra_tokens=60)):
        assert draft.weight_bytes(model, ONE) == 0
    assert SkipDraft(num_layers=8).layers(model).num_layers == 8


def test_every_module_of_multi_token_prediction_is_stored(models):
    model = models["deepseek_r1"]
    one, two = (LayerDraft(kind="mtp", num_modules=n) for n in (1, 2))
    assert two.weight_bytes(model, ONE) == 2 * one.weight_bytes(model, ONE)
    assert two.kv_bytes_per_token(model, ONE) == 2 * one.kv_bytes_per_token(model, ONE) == 2 * 576 * 2


def test_only_lookahead_adds_rows_to_the_pass():
    assert PassDraft(extra_tokens=60).pass_tokens == 60
    own = PassDraft.of_window(15, 5, own_pass=True)
    assert (own.pass_tokens, own.extra_tokens, own.columns) == (0, 60, 15)
    with pytest.raises(ValueError, match="own_pass=true: pipeline_parallel_size=2: must be 1"):
        own.check(None, ParallelLayout(pipeline_parallel_size=2))
    assert LayerDraft().pass_tokens == HostDraft().pass_tokens == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerDraft(kind="dflash"), "kind=dflash: must be one of eagle, eagle3, mtp"),
        (lambda: LayerDraft(num_layers=0), "num_layers=0: must be >= 1"),
        (lambda: LayerDraft(vocab_size=0), "vocab_size=0: must be >= 1, or null for the target's"),
        (lambda: LayerDraft(step_s=-1e-6), "step_s=-1e-06: must be a finite number >= 0 s"),
        (lambda: HeadDraft(num_heads=0), "num_heads=0: must be >= 1"),
        (lambda: HostDraft(kilotoken_s=float("nan")), "kilotoken_s=nan: must be a finite number >= 0 s"),
        (lambda: PassDraft(extra_tokens=0), "extra_tokens=0: must be >= 1"),
    ],
)
def test_wrong_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_draft_that_does_not_suit_the_target_is_named(models):
    small, target = models["llama3_2_1b"], models["qwen3_30b_a3b"]
    with pytest.raises(ValueError, match=r"has 128,256 tokens in its vocabulary, \S+ has 151,936; choose"):
        ModelDraft(model=small).check(target, ONE)
    with pytest.raises(ValueError, match="tensor_parallel_size=4: must be 1 or 2, the target's"):
        ModelDraft(model=small, tensor_parallel_size=4).check(models["llama3_1_70b"], TWO)
    with pytest.raises(ValueError, match="intermediate_size=null: eagle3 layers have a dense MLP"):
        LayerDraft(kind="eagle3").check(target, ONE)
    replace(LayerDraft(kind="eagle3"), intermediate_size=6144).check(target, ONE)
    with pytest.raises(ValueError, match="num_layers=48: must be < 48, the layers of"):
        SkipDraft(num_layers=48).check(target, ONE)
