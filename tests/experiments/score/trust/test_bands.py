"""Bands hold for groups that were never seen: half and nine in ten of their rows, whatever groups share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.score.trust.bands import FAMILY, FEW, RowError, Tree, bound, correlation

FAMILY_CELL = tuple("abcdef"[:FAMILY])


def groups_of(rng, number, rows, between, within):
    """Draws groups of signed errors in percent: a bias per group, and a scatter of its rows."""
    return [10 * (rng.normal(0, between) + rng.normal(0, within, rows)) for _ in range(number)]


def tree_of(cells):
    """Returns the tree of cell -> arrays of errors per group."""
    return Tree(
        RowError(cell, (cell, number), f"{cell}{number}-{row}", float(percent))
        for cell, groups in cells.items()
        for number, errors in enumerate(groups)
        for row, percent in enumerate(errors)
    )


@pytest.mark.parametrize("number", [5, 8, 15])
@pytest.mark.parametrize(("between", "within"), [(0, 1), (0.5, 0.7), (1, 0.5), (1, 0.1)])
def test_half_and_nine_in_ten_rows_of_a_new_group_are_within(number, between, within):
    rng, draws = np.random.default_rng(7), 400
    inside = np.zeros(2)
    for _ in range(draws):
        *known, new = groups_of(rng, number + 1, 10, between, within)
        limits = [bound([np.abs(own) for own in known], share) for share in (0.5, 0.9)]
        inside += [np.mean(np.abs(new) <= limit) / draws for limit in limits]
    assert inside == pytest.approx([0.5, 0.9], abs=0.06)


def test_rows_alone_would_promise_too_much_where_groups_differ():
    rng = np.random.default_rng(3)
    plain, own = [], []
    for _ in range(300):
        *known, new = groups_of(rng, 6, 20, 1, 0.1)
        rows = np.abs(np.concatenate(known))
        plain.append(np.mean(np.abs(new) <= np.percentile(rows, 90)))
        own.append(np.mean(np.abs(new) <= bound([np.abs(one) for one in known], 0.9)))
    assert np.mean(plain) < 0.84 < np.mean(own)


@pytest.mark.parametrize("seed", range(3))
def test_left_out_groups_of_a_family_are_covered(seed):
    rng = np.random.default_rng(seed)
    engines = {
        (*FAMILY_CELL, name): groups_of(rng, number, 12, 0.8, 0.5)
        for name, number in {"vllm": 9, "sglang": 6, "tensorrt_llm": 2}.items()
    }
    found = tree_of(engines).coverage(FAMILY_CELL)
    assert (found.rows, found.groups) == (17 * 12, 17)
    assert found.of_groups == (pytest.approx(0.5, abs=0.07), pytest.approx(0.9, abs=0.05))


def test_left_out_group_does_not_change_its_own_band():
    rng = np.random.default_rng(1)
    groups = groups_of(rng, 8, 5, 1, 0.5)
    wild = [*groups[:-1], 100 * groups[-1]]
    left_out = (FAMILY_CELL, 7)
    bands = [tree_of({FAMILY_CELL: own}).band(FAMILY_CELL, without=left_out) for own in (groups, wild)]
    assert bands[0] == bands[1]
    assert tree_of({FAMILY_CELL: wild}).band(FAMILY_CELL) != bands[0]


def test_cell_of_one_ordinary_group_has_the_band_above_it():
    rng = np.random.default_rng(2)
    cells = {(*FAMILY_CELL, "many"): groups_of(rng, 12, 10, 0.5, 0.5), (*FAMILY_CELL, "one"): [[0.2, 0.3]]}
    tree = tree_of(cells)
    above, one = tree.band(FAMILY_CELL), tree.band((*FAMILY_CELL, "one"))
    assert one[:2] == above[:2]
    assert (one.rows, one.groups, one.basis_groups) == (2, 1, 13)
    assert tree.band((*FAMILY_CELL, "none")) == above


def test_few_bad_groups_widen_and_many_count_for_themselves():
    rng = np.random.default_rng(4)
    good = groups_of(rng, 12, 10, 0.5, 0.5)
    medians = []
    for number in (1, 2, 4, 8):
        cell = (*FAMILY_CELL, "bad")
        tree = tree_of({(*FAMILY_CELL, "good"): good, cell: [[90.0, 100.0, 110.0]] * number})
        above, band = tree.band(FAMILY_CELL), tree.band(cell)
        medians.append(band.median_percent / above.median_percent)
        assert band.p90_percent > above.p90_percent
        assert band.basis_groups == (12 + number if number < FEW else number)
    assert medians[0] > 1
    assert medians[:3] == sorted(medians[:3])


def test_a_figure_without_family_takes_the_one_above():
    rng = np.random.default_rng(5)
    rare = (*FAMILY_CELL[:-2], "burst", "moe")
    tree = tree_of({FAMILY_CELL: groups_of(rng, 10, 5, 0.5, 0.5), rare: [[1.0]]})
    assert tree.band(rare).basis_groups == 11
    assert tree.band(rare).median_percent == tree.band(FAMILY_CELL[:-2]).median_percent
    assert tree.band(("other",)) is None


def test_correlation_of_groups_that_are_alike_or_unlike():
    rng = np.random.default_rng(6)
    same = [np.exp(rng.normal(0, 1, 50)) for _ in range(30)]
    unlike = [np.exp(rng.normal(0, 2) + rng.normal(0, 0.1, 50)) for _ in range(30)]
    assert correlation(same) < 0.05
    assert correlation(unlike) > 0.9
    assert correlation(same[:1]) == correlation([np.ones(1), np.ones(1)]) == 0.5


DEVIATIONS = st.lists(st.floats(-2, 2), min_size=2, max_size=12).filter(lambda one: max(one) > 0.1)


@given(deviations=DEVIATIONS, seed=st.integers(0, 100), factor=st.floats(1.2, 3))
def test_groups_that_differ_more_have_wider_bands(deviations, seed, factor):
    rows = np.exp(np.random.default_rng(seed).normal(0, 0.3, (len(deviations), 6)))
    own = np.array(deviations) - np.median(deviations)

    def p90(spread):
        return bound(list(10 * np.exp(spread * own)[:, None] * rows), 0.9)

    assert p90(factor) >= p90(1.0) * (1 - 1e-9)


@given(
    errors=st.lists(st.lists(st.floats(0.2, 1e3), min_size=1, max_size=5), min_size=1, max_size=9),
    factor=st.floats(1, 10),
)
def test_bands_grow_with_the_errors_and_the_share(errors, factor):
    groups = [np.array(own) for own in errors]
    limits = [bound(groups, share) for share in (0.5, 0.9, 0.95)]
    assert limits == sorted(limits)
    assert bound([factor * own for own in groups], 0.9) == pytest.approx(factor * limits[1])
