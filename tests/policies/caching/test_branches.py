"""Branches against tables written out by hand, and against a naive model that copies tokens."""

from hypothesis import given
from hypothesis import strategies as st

from policies.caching.block_tables import Branches

FOR_EVER = 10**6


def test_samples_share_the_prompts_partial_block_until_they_write_into_it():
    """6 prompt tokens in blocks of 4: a full block, and block 0 with 2. Three samples: 0 is copied twice."""
    branches = Branches(6, 4, [FOR_EVER] * 3)
    branches.produce(None)
    assert branches.num_shared_tokens == 4
    assert (branches.tables, branches.num_blocks, branches.clock) == ([[0], [0], [0]], 1, 2)
    assert branches.blocks_to_append() == 2
    assert branches.append() == 2 * 2
    assert branches.copies == [(0, 1), (0, 2)]
    assert (branches.tables, branches.num_blocks, branches.clock) == ([[1], [2], [0]], 3, 9)
    branches.produce(None)
    assert branches.blocks_to_append() == 0  # each has a place left in a block of its own
    assert branches.append() == 0
    assert branches.blocks_to_append() == 3  # full: a new block each, nothing to copy
    assert branches.append() == 0
    assert branches.tables == [[1, 3], [2, 4], [0, 5]]
    assert branches.clock == 3 * 5


def test_a_full_prompt_is_not_copied():
    branches = Branches(8, 4, [FOR_EVER] * 3)
    assert (branches.num_blocks, branches.clock, branches.blocks_to_append()) == (0, 0, 3)
    assert branches.append() == 0
    assert branches.tables == [[0], [1], [2]]


def test_a_sample_that_ends_gives_its_blocks_back():
    branches = Branches(6, 4, [1, 5, 2])
    assert branches.produce(None) == []  # the first ends with its first token; the others still share
    assert (branches.width, branches._ends) == (2, [5, 2])
    branches.append()
    assert branches.tables == [[1], [0]]
    assert branches.produce(None) == [0]
    assert branches.tables == [[1]]
    assert (branches.depth, branches.num_emitted) == (2, 3 + 2)


def test_beams_that_continue_one_share_what_it_had():
    """Both go on with the second beam: the first one's block is free, and the next write copies."""
    branches = Branches(4, 4, [FOR_EVER] * 2)
    branches.produce(None)
    branches.append()
    assert branches.produce((1, 1)) == [0]
    assert branches.tables == [[1], [1]]
    assert branches.clock == 1
    assert branches.append() == 1
    assert branches.tables == [[2], [1]]


def test_without_sharing_each_branch_has_copies_of_everything():
    branches = Branches(6, 4, [FOR_EVER] * 2, shares=False)
    assert (branches.num_shared_tokens, branches.tables, branches.clock) == (0, [[0, 1], [2, 3]], 12)
    branches.produce(None)
    branches.append()
    assert branches.produce((1, 1)) == []
    assert (branches.num_blocks, branches.clock) == (4, 14)


class Naive:
    """Every branch as the list of its tokens; a block is identified by its writer and its time of copy."""

    def __init__(self, num_prompt_tokens, block_size, width):
        self.block_size = block_size
        rest = num_prompt_tokens % block_size
        self.num_made = 1
        self.tables = [[("prompt", rest)] if rest else [] for _ in range(width)]

    def append(self):
        """Returns how many blocks were new."""
        num_new = 0
        for i, table in enumerate(self.tables):
            if not table or table[-1][1] == self.block_size:
                table.append((self._name(), 1))
                num_new += 1
                continue
            name, filled = table[-1]
            if any(other[-1] == (name, filled) for j, other in enumerate(self.tables) if j != i):
                name = self._name()
                num_new += 1
            table[-1] = (name, filled + 1)
        return num_new

    def fork(self, parents):
        self.tables = [list(self.tables[parent]) for parent in parents]

    @property
    def blocks(self):
        return {block for table in self.tables for block in table}

    def _name(self):
        self.num_made += 1
        return self.num_made


@given(st.data(), st.integers(1, 20), st.sampled_from([1, 2, 3, 4, 16]), st.integers(1, 5))
def test_blocks_are_those_of_a_model_that_writes_every_table_out(data, num_prompt, block_size, width):
    branches = Branches(num_prompt, block_size, [FOR_EVER] * width)
    naive = Naive(num_prompt, block_size, width)
    branches.produce(None)
    for _ in range(data.draw(st.integers(1, 40))):
        num_due, num_before = branches.blocks_to_append(), branches.num_blocks
        branches.append()
        assert branches.num_blocks - num_before == num_due == naive.append()
        parents = None
        if data.draw(st.booleans()):
            one = st.integers(0, branches.width - 1)
            parents = tuple(data.draw(st.lists(one, min_size=1, max_size=branches.width)))
            naive.fork(parents)
        num_before = branches.num_blocks
        freed = branches.produce(parents)
        branches.check_integrity()
        assert num_before - branches.num_blocks == len(freed)
        assert branches.num_blocks == len(naive.blocks)
        assert branches.clock == sum(filled for _, filled in naive.blocks)
