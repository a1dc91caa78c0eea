"""Acceptance by task: counted in an engine (table), and from published mean lengths (lengths)."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from policies.speculation import TokenTree
from policies.speculation.proposers import Ngram
from sim.settings.build import build
from sim.settings.errors import ConfigError
from sim.speculation.acceptance.lengths import MeanLengths, mean_length_of_tree, rate_of_chain, rate_of_tree
from sim.speculation.acceptance.rates import mean_accepted_length, with_ranks
from sim.speculation.acceptance.table import Table, task_of
from tests.sim.speculation.drafts import Drafts, chain, passes, request

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "acceptance"
COUNTS = """task,place,passes,drafted,accepted
chat,1,1000,800,600
chat,2,1000,700,400
chat,3,1000,350,100
code,1,500,500,450
code,2,500,500,400
code,3,500,500,390
"""


def written(folder, text=COUNTS):
    path = folder / "acceptance.csv"
    path.write_text(text)
    return path


def preset(name, **settings):
    return build(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()) | settings, "acceptance")


def test_shares_of_drafted_and_accepted_tokens_come_out_as_counted(tmp_path):
    table = Table(path=written(tmp_path), task="chat")
    verdicts = table.verdicts(request(), 0, 100_000, chain(3))
    for place, (drafted, accepted) in enumerate([(0.8, 0.6), (0.7, 0.4), (0.35, 0.1)]):
        assert (verdicts.proposed > place).mean() == pytest.approx(drafted, abs=0.006)
        assert (verdicts.accepted > place).mean() == pytest.approx(accepted, abs=0.006)
    assert (verdicts.accepted <= verdicts.proposed).all()


def test_a_proposer_that_always_drafts_has_no_array_of_proposals(tmp_path):
    verdicts = Table(path=written(tmp_path), task="code").verdicts(request(), 0, 50_000, chain(3))
    assert verdicts.proposed is None
    for place, rate in enumerate([0.9, 0.8, 0.78]):
        assert (verdicts.accepted > place).mean() == pytest.approx(rate, abs=0.008)


def test_fewer_draft_tokens_cut_proposals_and_verdicts(tmp_path):
    table = Table(path=written(tmp_path), task="chat")
    full, cut = (table.verdicts(request(), 0, 2000, chain(k)) for k in (3, 2))
    assert cut.proposed.tolist() == np.minimum(full.proposed, 2).tolist()
    assert cut.accepted.tolist() == np.minimum(full.accepted, 2).tolist()


def test_tenants_have_their_tasks_and_other_sessions_draw_one(tmp_path):
    table = Table(path=written(tmp_path), tasks={"programmers": "code"})
    assert table.verdicts(request(1, tenant="programmers"), 0, 9, chain(3)).proposed is None
    drawn = [task_of(request(number), 0, None, {}, ("a", "b", "c")) for number in range(3000)]
    assert all(abs(drawn.count(task) - 1000) < 4 * np.sqrt(3000 * 2 / 9) for task in "abc")
    of_session = {task_of(request(n, session_id=7), 0, None, {}, ("a", "b", "c")) for n in range(20)}
    assert len(of_session) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "acceptance.csv:1:1: no column task, place, passes, drafted, accepted; must have"),
        ("task,place,passes,drafted\n", ":1:1: no column accepted"),
        ("task,place,passes,drafted,accepted\n", ":2:1: expected at least one task, found none"),
        (COUNTS + "chat,5,1000,300,50\n", ":8:1: task chat has place 5 after 3 places; list the places"),
        (COUNTS + "chat,4,900,300,50\n", ":8:1: task chat has 900 passes, and 1000 before"),
        (COUNTS + "chat,4,1000,360,50\n", ":8:1: task chat has drafted=360 at place 4, more than 350"),
        (COUNTS + "chat,4,1000,300,150\n", ":8:1: task chat has accepted=150 at place 4, more than 100"),
        (COUNTS + "maths,1,10,5,6\n", ":8:1: accepted=6, drafted=5, passes=10: must be >= 0 and in"),
        (COUNTS + "maths,1,0,0,0\n", ":8:1: accepted=0, drafted=0, passes=0: must be"),
        (COUNTS + "maths,1,10,5,many\n", ":8:1: expected whole numbers for place, passes, drafted, accepted"),
        (COUNTS + "maths,1,10\n", ":8:1: expected whole numbers for place"),
        (COUNTS + ",1,10,5,5\n", ":8:1: must name a task"),
        (COUNTS + "maths,256,10,5,5\n", ":8:1: place=256: must be >= 1 and <= 255"),
        (COUNTS + f"maths,1,{10**30},5,5\n", ":8:1: accepted=5, drafted=5, passes=1000"),
    ],
)
def test_rejects_tables_that_are_none(tmp_path, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Table(path=written(tmp_path, text))


def test_rejects_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        Table(path=tmp_path / "acceptance.csv")


def test_missing_tasks_are_named_with_those_that_exist(tmp_path):
    path = written(tmp_path)
    with pytest.raises(ValueError, match=r"tasks.b=poems: .* has no task maths, poems; it has chat, code"):
        Table(path=path, tasks={"a": "chat", "b": "poems", "c": "maths"})
    with pytest.raises(ValueError, match=r"task=maths: .* has no task maths; it has chat, code"):
        Table(path=path, task="maths")
    with pytest.raises(ConfigError, match=r"acceptance.task=poems: lengths has no task poems; it has"):
        preset("spec_bench", task="poems")


def test_rejects_longer_drafts_than_were_counted(tmp_path):
    with pytest.raises(ValueError, match="task chat has 3 places, and a draft has 4"):
        Table(path=written(tmp_path)).check(chain(4))
    Table(path=written(tmp_path)).check(chain(3))


@given(st.floats(1, 9), st.integers(1, 12))
def test_the_rate_of_a_chain_has_the_length_it_was_made_from(length, num_tokens):
    length = min(length, num_tokens + 1)
    rate = rate_of_chain(length, num_tokens)
    assert mean_accepted_length(rate, num_tokens) == pytest.approx(length, abs=1e-9)


@given(st.floats(1, 4), st.lists(st.integers(1, 4), min_size=3, max_size=3), st.floats(0, 1))
def test_the_rate_of_a_tree_has_the_length_it_was_made_from(length, widths, decay):
    tree = TokenTree.of_widths(widths)
    rates_K = np.full(tree.depth, rate_of_tree(length, tree, decay))
    rates_KR = with_ranks(rates_K, max(widths), decay)
    assert mean_length_of_tree(rates_KR, tree) == pytest.approx(length, abs=1e-6)


EAGLE_TREE = """0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100
0000 0001 0002 00000 00001"""


def test_the_length_of_eagles_tree_gives_the_rates_that_eagle_has_as_a_chain():
    """Compares with EAGLE's Table 2: Vicuna-7B on MT-bench has 3.94 tokens per pass with its tree."""
    tree = TokenTree.of_paths([[int(rank) for rank in path] for path in EAGLE_TREE.split()])
    measured_rates_by_place = (0.79, 0.74, 0.72, 0.73, 0.67)
    assert min(measured_rates_by_place) < rate_of_tree(3.94, tree, 0.32) < max(measured_rates_by_place)


@pytest.mark.parametrize("method", ["draft_model", "ngram", "medusa", "lookahead", "eagle"])
def test_spec_bench_comes_out_as_published_with_the_measured_drafts(method):
    model = preset("spec_bench", task="math")
    paths = [list(path) for path in model.trees.get(method, ())]
    tree = TokenTree.of_paths(paths) if paths else None
    drafts = type("Method", (Drafts,), {"method": method})
    proposer = drafts(model.num_draft_tokens.get(method, len(paths)), tree)
    model.check(proposer)
    accepted = [passes(model.verdicts(request(n), 0, 3000, proposer), 255) for n in range(20)]
    assert 1 + np.mean(np.concatenate(accepted)) == pytest.approx(model.lengths[method]["math"], rel=0.02)


def test_a_chain_has_the_rate_of_rank_1_of_the_measured_tree():
    model, eagle = preset("spec_bench", task="multi_turn"), type("Eagle", (Drafts,), {"method": "eagle"})
    accepted = model.verdicts(request(), 0, 100_000, eagle(3)).accepted
    assert (accepted > 0).mean() == pytest.approx(0.765, abs=0.006)
    assert (accepted > 1).mean() == pytest.approx(0.765**2, abs=0.007)


def test_sampled_text_is_accepted_less_often_than_greedy_text():
    greedy, sampled = preset("spec_bench"), preset("sampled")
    for method in sampled.lengths:
        for task in set(sampled.lengths[method]) & set(greedy.lengths[method]):
            assert sampled.lengths[method][task] < greedy.lengths[method][task]


LENGTHS = {"lengths": {"eagle": {"a": 2.0}}, "num_draft_tokens": {"eagle": 3}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": {}}, "lengths={}: must have at least one method"),
        ({"lengths": {"eagle": {}}}, "lengths.eagle={}: must have at least one task"),
        ({"num_draft_tokens": {}}, "lengths.eagle: must have either num_draft_tokens.eagle or trees.eagle"),
        ({"trees": {"eagle": ((0,),)}}, "lengths.eagle: must have either num_draft_tokens.eagle or trees"),
        ({"num_draft_tokens": {"eagle": 0}}, "num_draft_tokens.eagle=0: must be >= 1"),
        ({"lengths": {"eagle": {"a": 4.5}}}, "lengths.eagle.a=4.5: must be >= 1 and <= 4 tokens"),
        ({"lengths": {"eagle": {"a": 0.5}}}, "lengths.eagle.a=0.5: must be >= 1"),
        (
            {"num_draft_tokens": {}, "trees": {"eagle": ((0, 0),)}},
            "trees.eagle: path [0, 0] continues [0]",
        ),
        (
            {"lengths": {"eagle": {"a": 2.0}, "mtp": {"b": 2.0}}, "num_draft_tokens": {"eagle": 3, "mtp": 1}},
            "lengths.mtp: every method must have the same tasks; a, b is missing in one of them",
        ),
    ],
)
def test_rejects_lengths_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MeanLengths(**LENGTHS | settings)


def test_rejects_a_method_without_lengths():
    with pytest.raises(ValueError, match="lengths: has no method draft_model; choose speculation"):
        MeanLengths(**LENGTHS).check(chain(3))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_choice_builds_and_gives_verdicts(path, tmp_path):
    recorded = tmp_path / "texts.jsonl"
    recorded.write_text('{"arrival_s": 0, "prompt_token_ids": [1], "output_token_ids": [1]}\n')
    needed = {
        "by_position": {"rates": [0.8, 0.7, 0.6]},
        "by_class": {"rates": {"code": 0.9}},
        "table": {"path": str(written(tmp_path))},
        "text": {"path": str(recorded)},
    }
    model = preset(path.stem, **needed.get(path.stem, {}))
    proposer = Ngram(draft=None, num_speculative_tokens=3) if path.stem == "text" else chain(3)
    model.check(proposer)
    accepted = model.verdicts(request(), 0, 1000, proposer).accepted
    assert accepted.dtype == np.uint8
    assert 0 < accepted.mean() < 3
