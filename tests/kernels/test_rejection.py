from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.rejection import match_drafts, match_drafts_reference
from tests.examples import examples


def by_hand(tokens, drawn, starts, max_depth, parents):
    """Follows the path of each sequence with plain lists."""
    accepted, paths = [], []
    for first, end in pairwise(starts):
        path = [first]
        while len(path) <= max_depth:
            now = path[-1]
            fits = [
                row
                for row in range(first + 1, end)
                if (parents[row] == now - first if parents else row == now + 1) and tokens[row] == drawn[now]
            ]
            if not fits:
                break
            path.append(fits[0])
        accepted.append(len(path) - 1)
        paths.append(path + path[-1:] * (max_depth + 1 - len(path)))
    return accepted, [[drawn[row] for row in path] for path in paths], paths


@examples(12, 40)
@given(
    sizes=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    is_tree=st.booleans(),
    vocab=st.integers(1, 3),
    max_depth=st.integers(0, 6),
    wide=st.booleans(),
    seed=st.integers(0, 999),
)
def test_accepted_paths_are_those_of_the_definition(
    sizes, is_tree, vocab, max_depth, wide, seed, generator, guarded
):
    random = generator(seed)
    rows = sum(sizes)
    tokens = torch.randint(0, vocab, (rows + 2,), generator=random)
    drawn = torch.randint(0, vocab, (rows,), generator=random)
    starts = torch.tensor([0, *sizes], dtype=torch.int64 if wide else torch.int32).cumsum(0)
    starts = starts.long() if wide else starts.int()
    parents = None
    if is_tree:
        parents = torch.cat(
            [(torch.rand(size, generator=random) * torch.arange(size)).long() for size in sizes]
        )
        parents[starts[:-1].long()] = -1
    expected = by_hand(
        tokens.tolist(), drawn.tolist(), starts.tolist(), max_depth, parents.tolist() if is_tree else None
    )
    arguments = [guarded(tokens), guarded(drawn), guarded(starts), max_depth]
    parents = guarded(parents) if is_tree else None
    for verify in (match_drafts, match_drafts_reference):
        assert tuple(part.tolist() for part in verify(*arguments, parents)) == expected


def test_a_chain_that_agrees_is_accepted_with_one_more_token():
    tokens, drawn = torch.tensor([9, 1, 2, 3]), torch.tensor([1, 2, 3, 4])
    for verify in (match_drafts, match_drafts_reference):
        found = verify(tokens, drawn, torch.tensor([0, 4]), 3)
        assert found.accepted_B.tolist() == [3]
        assert found.tokens_BD.tolist() == [[1, 2, 3, 4]]
        assert found.rows_BD.tolist() == [[0, 1, 2, 3]]
    assert match_drafts(tokens[:0], drawn[:0], torch.tensor([0]), 3).tokens_BD.shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens_T": torch.ones(2, dtype=torch.int64)}, "tokens_T: 2 rows; must have the 3"),
        ({"drawn_R": torch.ones(3)}, "drawn_R: torch.float32"),
        ({"starts_B": torch.ones(2)}, "starts_B: torch.float32"),
        ({"parents_R": torch.ones(3, 1, dtype=torch.int64)}, r"parents_R.*\[rows\]"),
        ({"max_depth": -1}, "max_depth=-1"),
    ],
)
def test_match_drafts_rejects(change, said):
    given_values = {
        "tokens_T": torch.ones(3, dtype=torch.int64),
        "drawn_R": torch.ones(3, dtype=torch.int64),
        "starts_B": torch.tensor([0, 3]),
        "max_depth": 2,
    }
    with pytest.raises(ValueError, match=said):
        match_drafts(**{**given_values, **change})
