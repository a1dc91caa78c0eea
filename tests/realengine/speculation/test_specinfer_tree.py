"""A drafted tree has the likeliest continuations of each node, as computed from the text of its path."""

import random

import pytest
import torch

from policies.speculation import TokenTree
from realengine.model.backend import TORCH
from realengine.model.decoder import Decoder
from realengine.speculation.drafters.draft_model import DraftModel
from realengine.speculation.drafters.specinfer_tree import SeveralDrafts, SpecinferTree
from realengine.weights.load import load_weights
from tests.realengine.model.test_decoder import CPU, cache_of, make
from tests.realengine.speculation.passes import Row, Sequences, continuation, next_logits

torch.set_num_threads(1)

MAX_LEN = 64


def model_of(config, num_blocks=70, max_len=MAX_LEN):
    spec, weights, decoder = make(config)
    model = DraftModel(decoder, cache_of(spec, num_blocks=num_blocks), TORCH, max_len, verifies_others=True)
    return spec, weights, model


def tree_of_the_text(spec, weights, tokens, widths, num_levels):
    """Computes the tree's tokens from the text of each path, without a cache."""
    level, nodes = [[]], []
    for width in widths[:num_levels]:
        level = [
            [*path, child]
            for path in level
            for child in next_logits(spec, weights, [*tokens, *path]).topk(width).indices.tolist()
        ]
        nodes += [path[-1] for path in level]
    return nodes


def path_to(tree, node):
    return [*path_to(tree, tree.parents[node]), node] if node >= 0 else []


def random_path(tree, draw, num_nodes):
    return path_to(tree, draw.randrange(-1, num_nodes))


def prompts(seqs, draw, lengths=(6, 11, 1)):
    rows = []
    for seq, length in enumerate(lengths):
        seqs.known[seq] = [draw.randrange(96) for _ in range(length)]
        rows.append(Row(seq, list(seqs.known[seq]), length, draw.randrange(96), is_decode=False))
    return rows


def rows_after(seqs, draw, tree, drafted):
    """Returns rows of accepted paths, with tokens that are not accepted behind them."""
    rows = []
    for seq, tokens in enumerate(drafted):
        path = random_path(tree, draw, len(tokens))
        others = [0] * (tree.depths[len(tokens) - 1] - len(path))
        taken = [seqs.known[seq][-1], *[tokens[node] for node in path]]
        rows.append(Row(seq, taken + others, len(taken), draw.randrange(96), is_decode=True))
    return rows


@pytest.mark.parametrize("is_joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize(
    ("config", "widths"),
    [("llama", (2, 2, 1)), ("llama", (1, 1, 3, 1, 1)), ("mistral", (3, 1, 2)), ("qwen3", (1, 2))],
)
def test_children_are_the_likeliest_after_any_accepted_path(config, widths, is_joined):
    spec, weights, model = model_of(config)
    drafter, tree = SpecinferTree(model, widths), TokenTree.of_widths(list(widths))
    seqs, draw = Sequences(70, 4, MAX_LEN, 3), random.Random(3)
    rows = prompts(seqs, draw)
    for num_levels in (len(widths), 1, len(widths), 2, len(widths)):
        passed = seqs.passed(rows, is_told=True, drafts_next=is_joined)
        drafter.follow(passed)
        tokens = drafter.draft(passed, seqs.start([0, 1, 2], num_padding=1), num_levels).tokens_NK
        assert tokens.shape == (4, tree.num_nodes_to(num_levels))
        drafted = tokens[:3].tolist()
        assert drafted == [tree_of_the_text(spec, weights, known, widths, num_levels) for known in seqs.known]
        rows = rows_after(seqs, draw, tree, drafted)


def test_each_of_several_models_drafts_a_branch():
    spec, weights, model = model_of("llama")
    weights_2 = load_weights(None, spec, torch.float32, CPU, seed=9)
    for name, weight in weights_2.items():
        if not name.endswith("norm.weight"):
            weight.mul_(10)
    second = DraftModel(
        Decoder(spec, weights_2, TORCH, 128), cache_of(spec), TORCH, MAX_LEN, verifies_others=True
    )
    drafter = SeveralDrafts([model, second])
    assert drafter.cache_sets == (*model.cache_sets, *second.cache_sets)
    tree = TokenTree.of_widths([2, 1, 1])
    seqs, draw = Sequences(70, 4, MAX_LEN, 3), random.Random(3)
    rows = prompts(seqs, draw)
    for num_levels in (3, 2, 3, 3):
        passed = seqs.passed(rows, is_told=True)
        drafter.follow(passed)
        drafted = drafter.draft(passed, seqs.start([0, 1, 2]), num_levels).tokens_NK.tolist()
        for known, tokens in zip(seqs.known, drafted, strict=True):
            assert tokens[0::2] == continuation(spec, weights, known, num_levels)
            assert tokens[1::2] == continuation(spec, weights_2, known, num_levels)
        rows = rows_after(seqs, draw, tree, drafted)


def test_a_tree_at_the_end_of_the_context_writes_nothing_behind_it():
    spec, weights, model = model_of("llama", num_blocks=5, max_len=18)
    drafter, widths = SpecinferTree(model, (2, 2, 2)), (2, 2, 2)
    seqs, draw = Sequences(5, 4, 18, 1), random.Random(8)
    rows = prompts(seqs, draw, lengths=(15,))
    passed = seqs.passed(rows)
    drafter.follow(passed)
    before = [
        layer.keys[seqs.tables[0, :4].long()].flatten(0, 1)[:15].clone()
        for layer in model.cache.layers.values()
    ]
    found = drafter.draft(passed, seqs.start([0]), 3).tokens_NK[0].tolist()
    assert found[:2] == tree_of_the_text(spec, weights, seqs.known[0], widths, 1)
    for layer, keys in zip(model.cache.layers.values(), before, strict=True):
        after = layer.keys[seqs.tables[0].long()].flatten(0, 1)
        assert torch.equal(after[:15], keys)
        assert not after[18:].any()


def test_rejects_a_tree_that_the_context_has_no_room_for():
    _, _, model = model_of("llama", max_len=14)
    with pytest.raises(
        ValueError, match=r"widths=\[2, 2, 2\]: 14 nodes need KV of more than 14 tokens, it holds 14"
    ):
        SpecinferTree(model, (2, 2, 2))


def test_rejects_more_children_than_there_are_tokens():
    _, _, model = model_of("llama", num_blocks=200, max_len=800)
    with pytest.raises(ValueError, match=r"widths=\[1, 98\]: .* vocab_size=97"):
        SpecinferTree(model, (1, 98))
