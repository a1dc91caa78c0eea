"""Tests of token trees."""

import pytest

from policies.speculation import TokenTree


def test_a_tree_of_widths_has_all_its_nodes_by_depth() -> None:
    tree = TokenTree.of_widths([2, 2])
    assert tree.parents == (-1, -1, 0, 0, 1, 1)
    assert tree.depths == (1, 1, 2, 2, 2, 2)
    assert tree.ranks == (0, 1, 0, 1, 0, 1)
    assert (tree.num_nodes, tree.depth, tree.num_nodes_to(1)) == (6, 2, 2)
    assert tree.children(1) == [4, 5]


def test_medusas_paths_are_a_tree() -> None:
    assert TokenTree.of_paths([[0], [0, 0], [1], [0, 1], [0, 0, 0]]).parents == (-1, -1, 0, 0, 2)


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, 0, -1), (-2,)])
def test_what_is_no_tree_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"no tree|by depth|at least one"):
        TokenTree(parents)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [1, 0]], r"path \[1, 0\] continues \[1\], which is no path"),
        ([[0], [0, 2], [0, 0]], r"path \[0, 2\] has rank 2, and \[0, 1\] is no path"),
        ([[0], [-1]], r"path \[-1\] has rank -1; ranks are whole numbers >= 0"),
    ],
    ids=["beginning", "gaps", "negative"],
)
def test_wrong_paths_are_refused(paths: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree.of_paths(paths)


def test_a_beam_verifies_the_most_likely_nodes() -> None:
    """rate 0.5, decay 0.5, width 2: a first child has 0.5, a second 0.5 x 0.25 = 0.125."""
    # Level 1: 0.5, 0.125. Level 2: 0.25, 0.0625 below the first, 0.0625, 0.0156 below the second.
    # Level 3 continues the nodes of 0.25 and 0.0625: 0.125, 0.031 and 0.031, 0.0078.
    tree = TokenTree.of_beam(2, 3, 5, rate=0.5, rank_decay=0.5)
    assert tree == TokenTree.of_paths([[0], [0, 0], [1], [0, 0, 0], [0, 1]])
    assert TokenTree.of_beam(2, 3, 100, rate=0.5, rank_decay=0.5).num_nodes == 2 + 4 + 4
    assert TokenTree.of_beam(1, 4, 4).parents == (-1, 0, 1, 2)


@pytest.mark.parametrize(
    "more", [{"width": 0}, {"depth": 0}, {"num_nodes": 0}, {"rate": 0.0}, {"rank_decay": 1.5}]
)
def test_a_beam_without_nodes_is_refused(more: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(more))}=.*must be >"):
        TokenTree.of_beam(**{"width": 2, "depth": 2, "num_nodes": 3} | more)


def test_a_beam_of_too_many_nodes_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"width=1000000, depth=5: propose .* must be at most 20,000"):
        TokenTree.of_beam(1_000_000, 5, 10)
