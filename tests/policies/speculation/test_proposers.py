"""Tests of the proposers: their rules, and the settings that they refuse."""

from typing import Any

import pytest

from policies.speculation import Proposer, SlotRules, TokenTree, num_places
from policies.speculation.proposers import (
    DraftModel,
    Eagle,
    Eagle3,
    Lookahead,
    Medusa,
    Mtp,
    Ngram,
    SelfSpeculative,
    SpecinferTree,
    Suffix,
)

CHAINS = (DraftModel, Ngram, Suffix, Medusa, Eagle, Eagle3, Mtp, SelfSpeculative)
SYNCHRONOUS = SlotRules(overlaps=False)
ON_HIDDEN_STATES = SlotRules(keeps_lookahead=True, drops_last_block=True)


def made(kind: Any, **settings: Any) -> Any:
    return kind(draft=None, **settings)


@pytest.mark.parametrize(
    ("kind", "method", "rules"),
    [
        (DraftModel, "draft_model", SlotRules(keeps_lookahead=True, num_input_slots=1)),
        (Ngram, "ngram", SYNCHRONOUS),
        (Suffix, "suffix", SYNCHRONOUS),
        (Medusa, "medusa", SYNCHRONOUS),
        (Eagle, "eagle", ON_HIDDEN_STATES),
        (Eagle3, "eagle3", ON_HIDDEN_STATES),
        (Mtp, "mtp", ON_HIDDEN_STATES),
        (SelfSpeculative, "self_speculative", SlotRules(keeps_lookahead=True, overlaps=False)),
    ],
)
def test_a_chain_has_the_rules_of_its_method(kind: Any, method: str, rules: SlotRules) -> None:
    proposer: Proposer = made(kind, num_speculative_tokens=3)
    assert (proposer.method, proposer.rules, proposer.tree) == (method, rules, None)


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("num_tokens", [-1, 0])
def test_less_than_one_draft_token_is_refused_with_the_way_to_draft_nothing(
    kind: Any, num_tokens: int
) -> None:
    with pytest.raises(ValueError, match=rf"num_speculative_tokens={num_tokens}: must be 1 to 128; set spec"):
        made(kind, num_speculative_tokens=num_tokens)


def test_more_draft_tokens_than_a_rejection_sampler_takes_are_refused() -> None:
    assert made(Ngram, num_speculative_tokens=128).num_speculative_tokens == 128
    with pytest.raises(ValueError, match=r"num_speculative_tokens=129: must be 1 to 128$"):
        made(Ngram, num_speculative_tokens=129)


@pytest.mark.parametrize("kind", [Eagle, Eagle3, Medusa])
def test_the_draft_tokens_of_a_tree_are_its_nodes(kind: Any) -> None:
    tree = TokenTree.of_widths([2, 2])
    assert num_places(made(kind, num_speculative_tokens=6, tree=tree)) == 2
    assert num_places(made(kind, num_speculative_tokens=6)) == 6
    with pytest.raises(ValueError, match="num_speculative_tokens=4: must be 6, the nodes of the tree"):
        made(kind, num_speculative_tokens=4, tree=tree)


def test_only_a_chain_of_eagle_overlaps() -> None:
    tree = TokenTree.of_widths([2, 2])
    assert made(Eagle, num_speculative_tokens=6).rules.overlaps
    assert not made(Eagle, num_speculative_tokens=6, tree=tree).rules.overlaps


def test_eagle_may_use_the_last_block_of_a_hit() -> None:
    kept = made(Eagle3, num_speculative_tokens=2, disable_eagle_block_drop=True)
    assert kept.rules == SlotRules(keeps_lookahead=True)


@pytest.mark.parametrize(("modules", "tokens", "lookahead"), [(1, 3, 0), (3, 1, 0), (3, 2, 2), (2, 4, 4)])
def test_several_modules_compute_the_end_of_a_prompt_together(
    modules: int, tokens: int, lookahead: int
) -> None:
    mtp = made(Mtp, num_speculative_tokens=tokens, num_nextn_predict_layers=modules)
    assert mtp.rules.prefill_lookahead == lookahead


def test_modules_draft_in_turn() -> None:
    with pytest.raises(ValueError, match=r"tokens=5: must be a multiple of num_\w+=3, or .*; nearest: 3"):
        made(Mtp, num_speculative_tokens=5, num_nextn_predict_layers=3)
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0: must be >= 1"):
        made(Mtp, num_speculative_tokens=5, num_nextn_predict_layers=0)


def test_the_shortest_ngram_is_the_longest_unless_it_is_set() -> None:
    assert made(Ngram, num_speculative_tokens=2, prompt_lookup_max=3).min_ngram == 3
    assert made(Ngram, num_speculative_tokens=2, prompt_lookup_min=2).min_ngram == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_lookup_max": 0}, "prompt_lookup_max=0: must be >= 1"),
        ({"prompt_lookup_max": 3, "prompt_lookup_min": 4}, "prompt_lookup_min=4: must be 1 to 3"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min=0: must be 1 to 5"),
        ({"reference": (7, -2)}, "reference=-2: must be token ids"),
    ],
)
def test_ngram_rejects_lengths_and_references_that_cannot_be(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(Ngram, num_speculative_tokens=2, **settings)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("suffix_decoding_max_tree_depth", 0, "must be >= 1"),
        ("suffix_decoding_max_cached_requests", -1, "must be >= 0"),
        ("suffix_decoding_max_spec_factor", -0.5, "must be >= 0"),
        ("suffix_decoding_min_token_prob", 1.5, "must be a share, >= 0 and <= 1"),
    ],
)
def test_suffix_rejects_values_out_of_range(name: str, value: float, rule: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: {rule}"):
        made(Suffix, num_speculative_tokens=2, **{name: value})


def test_specinfers_published_tree_has_20_nodes_on_8_levels() -> None:
    specinfer: Proposer = made(SpecinferTree, widths=(1, 1, 3, 1, 1, 1, 1, 1))
    assert specinfer.tree is not None
    assert (specinfer.num_speculative_tokens, specinfer.tree.depth) == (20, 8)
    assert specinfer.tree.num_nodes == 20
    assert specinfer.rules == SlotRules(keeps_lookahead=True, num_input_slots=1, overlaps=False)


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ((), r"widths=\[\]: must be a list"),
        ((2, 0), r"widths=\[2, 0\]: must be a list of numbers >= 1"),
        ((8, 8, 8), r"widths=\[8, 8, 8\], its nodes=584: must be 1 to 128"),
    ],
)
def test_specinfer_rejects_what_is_no_tree_or_too_large(widths: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(SpecinferTree, widths=widths)


def test_lookahead_verifies_ngrams_side_by_side() -> None:
    lookahead: Proposer = made(Lookahead, window=5, ngram=4, guesses=3)
    assert lookahead.num_speculative_tokens == 9
    assert lookahead.tree is not None
    assert (lookahead.tree.num_nodes, lookahead.tree.depth) == (9, 3)
    assert lookahead.tree.children(-1) == [0, 1, 2]
    assert all(len(lookahead.tree.children(node)) == (node < 6) for node in range(9))
    assert lookahead.rules == SlotRules(keeps_lookahead=True, overlaps=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window=0: must be >= 1"),
        ({"ngram": 1}, "ngram=1: must be >= 2"),
        ({"guesses": 0}, "guesses=0: must be >= 1"),
        ({"guesses": 40}, r"guesses=40, ngram=5: guesses x \(ngram - 1\)=160: must be 1 to 128"),
    ],
)
def test_lookahead_rejects_windows_that_verify_nothing_or_too_much(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(Lookahead, **settings)
