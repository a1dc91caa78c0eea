import re
from time import process_time_ns

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from policies.speculation import TokenTree
from sim.speculation.acceptance.by_position import ByPosition
from sim.speculation.acceptance.iid import Iid
from sim.speculation.acceptance.rates import (
    accepted_of_chain,
    accepted_of_tree,
    mean_accepted_length,
    uniforms,
    with_ranks,
)
from tests.sim.speculation.drafts import Drafts, chain, passes, request, tree

RATES = (0.9, 0.7, 0.75, 0.4)


def accepted_one_by_one(u, rates):
    """Returns what the definition says for a draft that begins with the first number of u."""
    count = 0
    while count < len(rates) and u[count] < rates[count]:
        count += 1
    return count


def accepted_path(u, rates_KR, shape):
    """Returns the depth of the node that a walk over the tree ends in, child by child."""
    node, depth = -1, 0
    while True:
        upper = 0.0
        for child in shape.children(node):
            lower, upper = upper, upper + rates_KR[depth][shape.ranks[child]]
            if lower <= u[depth] < upper:
                node, depth = child, depth + 1
                break
        else:
            return depth


@given(st.integers(0, 2**32), st.lists(st.floats(0, 1), min_size=1, max_size=9), st.integers(0, 40))
def test_chains_are_accepted_as_far_as_all_numbers_are_below_their_rates(seed, rates, num_positions):
    u = uniforms(seed, "test", 0, num_positions + len(rates) - 1)
    expected = [accepted_one_by_one(u[position:], rates) for position in range(num_positions)]
    assert accepted_of_chain(u, np.array(rates)).tolist() == expected


@given(st.data())
def test_trees_are_walked_child_by_child(data):
    num_nodes = data.draw(st.integers(1, 12))
    parents = sorted(data.draw(st.integers(-1, node - 1)) for node in range(num_nodes))
    shape = TokenTree(tuple(parents))
    weights = st.lists(st.floats(0, 1), min_size=num_nodes, max_size=num_nodes)
    rates_KR = np.array([data.draw(weights) for _ in range(shape.depth)]) / num_nodes
    u = uniforms(data.draw(st.integers(0, 2**32)), "test", 0, 30 + shape.depth - 1)
    expected = [accepted_path(u[position:], rates_KR.tolist(), shape) for position in range(30)]
    assert accepted_of_tree(u, rates_KR, shape).tolist() == expected


def test_a_tree_without_branches_is_a_chain():
    rates_K1 = np.array(RATES)[:, None]
    u = uniforms(0, "test", 0, 500)
    of_tree = accepted_of_tree(u, rates_K1, TokenTree((-1, 0, 1, 2)))
    assert of_tree.tolist() == accepted_of_chain(u, rates_K1[:, 0]).tolist()


@pytest.mark.parametrize(("rate", "num_tokens"), [(0.5, 1), (0.8, 4), (0.95, 8), (0.3, 15)])
def test_accepted_tokens_of_a_pass_are_truncated_geometric(rate, num_tokens):
    verdicts = [Iid(rate=rate).verdicts(request(number), 0, 400, chain(num_tokens)) for number in range(150)]
    accepted = np.concatenate([passes(one, num_tokens) for one in verdicts])
    share = np.array([rate**k * (1 - rate) for k in range(num_tokens)] + [rate**num_tokens])
    expected = share * len(accepted)
    counts = np.bincount(accepted, minlength=num_tokens + 1)
    rare = expected < 5  # a chi-square test needs at least 5 expected cases per bin
    counts = np.append(counts[~rare], counts[rare].sum()) if rare.any() else counts
    expected = np.append(expected[~rare], expected[rare].sum()) if rare.any() else expected
    assert stats.chisquare(counts, expected).pvalue > 1e-3
    standard_error = accepted.std() / np.sqrt(len(accepted))
    formula = (1 - rate ** (num_tokens + 1)) / (1 - rate)
    assert mean_accepted_length(rate, num_tokens) == pytest.approx(formula)
    assert 1 + accepted.mean() == pytest.approx(formula, abs=3.3 * standard_error)


def test_passes_are_independent_of_each_other():
    accepted = np.array(passes(Iid(rate=0.7).verdicts(request(), 5, 60_000, chain(3)), 3))
    joint = np.zeros((4, 4))
    np.add.at(joint, (accepted[:-1], accepted[1:]), 1)
    assert stats.chi2_contingency(joint).pvalue > 1e-3


def test_place_by_place_rates_come_out_as_they_went_in():
    model = ByPosition(rates=RATES)
    accepted = np.concatenate(
        [passes(model.verdicts(request(number), 1, 500, chain(4)), 4) for number in range(100)]
    )
    for place, rate in enumerate(RATES):
        reached = accepted >= place
        result = stats.binomtest(int((accepted[reached] > place).sum()), int(reached.sum()), rate)
        assert result.pvalue > 1e-3


@pytest.mark.parametrize("model", [Iid(rate=0.8), ByPosition(rates=RATES)])
def test_fewer_draft_tokens_cut_the_verdict_and_change_nothing_else(model):
    full = model.verdicts(request(3), 7, 300, chain(4)).accepted
    for k in range(1, 4):
        assert model.verdicts(request(3), 7, 300, chain(k)).accepted.tolist() == np.minimum(full, k).tolist()


def test_verdicts_do_not_depend_on_the_length_of_the_output_nor_on_the_attempt():
    long = Iid(rate=0.8).verdicts(request(3), 7, 300, chain(4)).accepted
    again = request(3)._replace(arrival_s=99.0)
    assert Iid(rate=0.8).verdicts(again, 7, 200, chain(4)).accepted.tolist() == long[:200].tolist()
    assert Iid(rate=0.8).verdicts(request(4), 7, 300, chain(4)).accepted.tolist() != long.tolist()
    assert Iid(rate=0.8).verdicts(request(3), 8, 300, chain(4)).accepted.tolist() != long.tolist()


def test_rates_of_0_and_1_are_certain():
    assert Iid(rate=0.0).verdicts(request(), 0, 500, chain(5)).accepted.max() == 0
    assert Iid(rate=1.0).verdicts(request(), 0, 500, chain(5)).accepted.min() == 5
    assert Iid(rate=1.0).verdicts(request(), 0, 500, tree(2, 2)).accepted.min() == 2


def test_further_ranks_find_a_part_of_the_misses():
    rates = with_ranks(np.array([0.7, 1.0, 0.0]), 4, 0.5)
    assert rates[0].tolist() == pytest.approx([0.7, 0.3 * 0.35, 0.3 * 0.65 * 0.35, 0.3 * 0.65**2 * 0.35])
    assert rates[1].tolist() == [1, 0, 0, 0]
    assert rates[2].tolist() == [0, 0, 0, 0]
    assert with_ranks(np.array([0.99, 0.5]), 50, 1.0).sum(axis=1).max() <= 1


@pytest.mark.parametrize(("decay", "first", "of_five"), [(0.32, 0.70, 0.89), (0.85, 0.57, 0.97)])
def test_the_decay_of_ranks_gives_the_figures_of_specinfer(decay, first, of_five):
    assert with_ranks(np.array([first]), 5, decay).sum() == pytest.approx(of_five, abs=0.005)


def test_a_wider_tree_is_accepted_as_far_or_farther():
    model = Iid(rate=0.6, rank_decay=0.3)
    narrow = model.verdicts(request(), 0, 2000, chain(3)).accepted
    wide = model.verdicts(request(), 0, 2000, tree(3, 2, 2)).accepted
    assert (wide >= narrow).all()
    assert wide.mean() > narrow.mean() + 0.3


def test_the_shares_of_a_tree_follow_from_its_rates():
    model = ByPosition(rates_by_rank=((0.5, 0.2, 0.1), (0.4, 0.3, 0.0)))
    accepted = model.verdicts(request(), 0, 100_000, tree(3, 2)).accepted
    assert (accepted >= 1).mean() == pytest.approx(0.8, abs=0.006)
    assert (accepted == 2).mean() == pytest.approx(0.8 * 0.7, abs=0.007)


def test_unconditional_rates_are_those_of_vllm():
    model = ByPosition(synthetic_acceptance_rates=(0.8, 0.6, 0.6, 0.0, 0.0))
    accepted = model.verdicts(request(), 0, 100_000, chain(5)).accepted
    for place, rate in enumerate(model.synthetic_acceptance_rates):
        assert (accepted > place).mean() == pytest.approx(rate, abs=0.006)


@pytest.mark.parametrize("length", [1.0, 2.82, 4.0, 6.0])
def test_the_mean_accepted_length_is_met_with_the_least_variance(length):
    model = ByPosition(synthetic_acceptance_length=length)
    model.check(chain(5))
    accepted = 1 + model.verdicts(request(), 0, 100_000, chain(5)).accepted.astype(int)
    assert accepted.mean() == pytest.approx(length, abs=0.005)
    assert accepted.max() - accepted.min() <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "rates=null: exactly one of rates, synthetic_acceptance_rates"),
        (
            {"rates": (0.5,), "synthetic_acceptance_length": 1.5},
            "rates: only one of rates, synthetic_acceptance_length may be given; set the others to null",
        ),
        ({"rates": ()}, "rates=[]: must have one rate per draft token"),
        ({"rates": (0.5, 1.5)}, "rates: place 2 has 1.5; must be a probability, >= 0 and <= 1"),
        ({"rates": (float("nan"),)}, "rates: place 1 has nan; must be a probability, >= 0 and <= 1"),
        ({"synthetic_acceptance_rates": (0.5, 0.6)}, "place 2 has 0.6, more than 0.5 before it"),
        (
            {"synthetic_acceptance_rates": (0.5, -0.1)},
            "synthetic_acceptance_rates: place 2 has -0.1; must be a probability, >= 0 and <= 1",
        ),
        ({"synthetic_acceptance_length": 0.9}, "synthetic_acceptance_length=0.9: must be finite and >= 1"),
        ({"rates_by_rank": ()}, "rates_by_rank=[]: must have one list of rates per place"),
        ({"rates_by_rank": ((0.5,), ())}, "rates_by_rank[1]=[]: must have one rate"),
        ({"rates_by_rank": ((0.7, 0.4),)}, "the rates of place 1 have the sum 1.1; must be <= 1"),
        ({"rates_by_rank": ((0.7, 0.2), (0.5,))}, "place 2 has 1 ranks and place 1 2"),
        ({"rates": (0.5,), "rank_decay": 2.0}, "rank_decay=2.0: must be a share, >= 0 and <= 1"),
    ],
)
def test_rejects_rates_that_are_none(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ByPosition(**settings)


@pytest.mark.parametrize(
    ("settings", "proposer", "message"),
    [
        ({"rates": RATES}, chain(5), "rates: has rates of 4 places, and a draft has 5"),
        ({"synthetic_acceptance_rates": (0.5,)}, chain(2), "has rates of 1 places, and a draft has 2"),
        ({"synthetic_acceptance_length": 4.5}, chain(3), "synthetic_acceptance_length=4.5: must be <= 4"),
        ({"rates_by_rank": ((0.5, 0.2),)}, tree(3), "has rates of 2 ranks, and a node of the tree has 3"),
        ({"rates_by_rank": ((0.5, 0.2),)}, tree(2, 1), "has rates of 1 places, and a draft has 2"),
    ],
)
def test_rejects_fewer_rates_than_the_drafts_need(settings, proposer, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ByPosition(**settings).check(proposer)


def test_more_rates_than_draft_tokens_are_allowed():
    """One more draft token than there are rates is refused."""
    ByPosition(rates=RATES).check(chain(2))
    ByPosition(rates=RATES).check(chain(len(RATES)))
    Iid(rate=0.5).check(Drafts(200))
    with pytest.raises(ValueError, match="rates: has rates of 4 places, and a draft has 5"):
        ByPosition(rates=RATES).check(chain(len(RATES) + 1))


@pytest.mark.parametrize(("name", "value"), [("rate", 1.1), ("rate", -0.5), ("rank_decay", float("nan"))])
def test_rejects_a_rate_that_is_no_probability(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}: must be a share, >= 0 and <= 1"):
        Iid(**{"rate": 0.5} | {name: value})


def test_verdicts_of_a_request_take_microseconds():
    model, proposer = ByPosition(rates=RATES * 2), chain(8)
    times = []
    for number in range(500):
        start = process_time_ns()
        model.verdicts(request(number), 0, 200, proposer)
        times.append(process_time_ns() - start)
    assert min(times) < 300e3
