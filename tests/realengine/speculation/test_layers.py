"""Heads and layers draft what a plain model drafts from the whole text, after any acceptance."""

import random
from dataclasses import replace

import pytest
import torch

from policies.speculation import TokenTree
from policies.speculation.proposers import Eagle, Eagle3, Medusa, Mtp
from realengine.model.architecture import Architecture
from realengine.model.kv_cache import KvCache
from realengine.speculation.checkpoints import Eagle3Options
from realengine.speculation.drafters import eagle, eagle3, medusa, mtp
from realengine.speculation.settings import SpeculationSettings
from tests.realengine.small_models import CONFIGS
from tests.realengine.small_models import make as make_llm
from tests.realengine.speculation.passes import Sequences
from tests.realengine.speculation.plain_layers import MAX_LEN, Plain, PlainHeads, context_of
from tests.realengine.speculation.test_draft_model import PROMPTS, decode_row, prompt_rows
from tests.realengine.speculation.test_lossless import GREEDY, prompts, tokens_of

torch.set_num_threads(1)


TREE = TokenTree.of_paths([[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 0, 0], [2, 0, 0], [2, 0, 1]])


PROPOSERS = {
    "medusa": (medusa, Medusa(draft=None, num_speculative_tokens=4)),
    "medusa tree": (medusa, Medusa(draft=None, num_speculative_tokens=TREE.num_nodes, tree=TREE)),
    "eagle": (eagle, Eagle(draft=None, num_speculative_tokens=4)),
    "eagle tree": (eagle, Eagle(draft=None, num_speculative_tokens=TREE.num_nodes, tree=TREE)),
    "eagle3": (eagle3, Eagle3(draft=None, num_speculative_tokens=4)),
    "eagle3 tree": (eagle3, Eagle3(draft=None, num_speculative_tokens=TREE.num_nodes, tree=TREE)),
    "eagle3 normed": (eagle3, Eagle3(draft=None, num_speculative_tokens=4)),
    "mtp": (mtp, Mtp(draft=None, num_speculative_tokens=4)),
}


def settings_of(proposer, source):
    return SpeculationSettings(proposer=proposer, models=(source,))


def scaled(tensors, factor=12.0):
    """Makes the drawn weights larger, so that drafts depend on all of them."""
    for name, tensor in tensors.items():
        if "norm" not in name and not name.startswith("embedding"):
            tensor.mul_(factor)


def expected_drafts(plain, known, tree, num_levels):
    if tree is None:
        found = []
        for _ in range(num_levels):
            found += plain.ranked(known, found, 1)
        return found
    paths = []
    for node in range(tree.num_nodes_to(num_levels)):
        before = paths[tree.parents[node]] if tree.parents[node] >= 0 else []
        paths.append([*before, plain.ranked(known, before, tree.ranks[node] + 1)[tree.ranks[node]]])
    return [path[-1] for path in paths]


def built(kind, monkeypatch):
    """Returns the drafter of a kind with random weights that were made larger, and its plain model."""
    module, proposer = PROPOSERS[kind]
    context, cache = context_of()
    loader = {"medusa": "load_heads", "eagle": "load_eagle", "eagle3": "load_eagle3", "mtp": "load_mtp"}
    name = loader[proposer.method]
    original, kept = getattr(module, name), []

    def load(*args):
        weights = original(*args)
        if proposer.method == "medusa":
            for blocks, projection in weights:
                scaled({"projection": projection} | {str(i): w for i, (w, _) in enumerate(blocks)})
        else:
            scaled(weights.tensors)
        if kind == "eagle3 normed":
            weights = weights._replace(options=Eagle3Options((0, 1, 2), norm_before_residual=True))
        kept.append(weights)
        return weights

    monkeypatch.setattr(module, name, load)
    source = context.architecture
    if proposer.method == "eagle3":
        source = replace(source, vocab_size=48)
    drafter = module.load(settings_of(proposer, source), context).build(cache)
    weights = kept[0]
    plain = (
        PlainHeads(context, weights)
        if proposer.method == "medusa"
        else Plain(proposer.method, context, weights)
    )
    return context, cache, drafter, proposer.tree, plain


@pytest.mark.parametrize("kind", PROPOSERS)
def test_drafts_equal_those_of_a_plain_model_after_any_acceptance(kind, monkeypatch):
    context, cache, drafter, tree, plain = built(kind, monkeypatch)
    seqs, draw = Sequences(70, 4, MAX_LEN, len(PROMPTS)), random.Random(5)
    rows = prompt_rows(seqs, draw)
    for num_levels in (3, 1, 0, 2, 3):
        drafting = [seq for seq in range(len(PROMPTS)) if num_levels and draw.random() < 0.8]
        passed = seqs.passed(rows, drafts_next=bool(drafting))
        states = context.target.states(passed.batch, cache, taps=drafter.taps)
        passed = replace(passed, states=states)
        drafter.follow(passed)
        drafted = {}
        if drafting:
            tokens = drafter.draft(passed, seqs.start(drafting, num_padding=1), num_levels).tokens_NK
            drafted = dict(zip(drafting, tokens.tolist(), strict=False))
        for seq, tokens in drafted.items():
            assert tokens == expected_drafts(plain, seqs.known[seq], tree, num_levels)
        rows = []
        for seq in range(len(PROMPTS)):
            drafts = drafted.get(seq, [])[:num_levels]
            rows.append(decode_row(seqs, draw, seq, drafts, draw.randint(0, len(drafts))))


@pytest.mark.parametrize("kind", PROPOSERS)
def test_no_token_changes(kind):
    _, proposer = PROPOSERS[kind]
    source = Architecture.from_hf(CONFIGS["llama"])
    llm = make_llm(speculative_config=settings_of(proposer, source))
    outputs = llm.generate(prompts(), GREEDY)
    assert tokens_of(outputs) == tokens_of(make_llm().generate(prompts(), GREEDY))
    assert all(output.drafts.num_draft_tokens > 0 for output in outputs)
    llm.engine.core.check_integrity()


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_no_token_changes_where_steps_overlap(kind):
    _, proposer = PROPOSERS[kind]
    source = Architecture.from_hf(CONFIGS["llama"])
    llm = make_llm(speculative_config=settings_of(proposer, source), overlap=True)
    assert tokens_of(llm.generate(prompts(), GREEDY)) == tokens_of(make_llm().generate(prompts(), GREEDY))


def test_the_layer_s_kv_has_the_target_s_blocks():
    context, cache = context_of()
    _, proposer = PROPOSERS["eagle"]
    loaded = eagle.load(settings_of(proposer, context.architecture), context)
    drafter = loaded.build(cache)
    (sets,) = drafter.cache_sets
    assert len(sets.tensors[0]) == len(cache.layers[0].keys)
    assert loaded.block_bytes == KvCache.bytes_per_block(
        replace(context.architecture, num_layers=1), 4, torch.float32
    )


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_trees_that_cannot_be_drafted_are_refused(method):
    config = {"method": method, "model": Architecture.from_hf(CONFIGS["llama"])}
    wide = config | {"speculative_token_tree": [(rank,) for rank in range(98)]}
    with pytest.raises(ValueError, match=r"speculative_token_tree: a node has 98 children: .* vocab_size=97"):
        make_llm(speculative_config=wide)
    deep = config | {"speculative_token_tree": [(0,), (1,), (0, 0), (0, 1)]}
    if method == "medusa":  # its nodes have no KV of their own
        outputs = make_llm(max_model_len=4, speculative_config=deep).generate([[1]], GREEDY)
        assert tokens_of(outputs) == tokens_of(make_llm(max_model_len=4).generate([[1]], GREEDY))
        return
    with pytest.raises(ValueError, match=r"speculative_token_tree: 4 nodes need KV .* it holds 4"):
        make_llm(max_model_len=4, speculative_config=deep)
