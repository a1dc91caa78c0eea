"""The buddy allocator: sizes, buddies, the paper's count of sequences. Shared promises: test_regions.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.caching.regions import Buddy

# Small sizes too, so that many regions are held at once.
SIZES = st.one_of(st.integers(1, 4), st.integers(1, 40))
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "allocate", "grow", "free"]), st.integers(0, 9), SIZES),
    max_size=40,
)


def aligned_and_free(free, size, num_tokens):
    """Starts of the aligned pieces of one size whose slots are all free: found without any free list."""
    starts = range(0, num_tokens - size + 1, size)
    return [start for start in starts if free.issuperset(range(start, start + size))]


@given(num_tokens=st.integers(4, 70), min_region_tokens=st.sampled_from([1, 2, 4]), operations=OPERATIONS)
def test_buddy_places_and_grows_as_a_search_of_every_aligned_piece_does(
    num_tokens, min_region_tokens, operations
):
    memory = Buddy(num_tokens, min_region_tokens=min_region_tokens)
    held, free = [], set(range(num_tokens))
    for operation, which, wanted in operations:
        size = next(s for s in (1, 2, 4, 8, 16, 32, 64) if s >= max(wanted, min_region_tokens))
        region = held.pop(which % len(held)) if operation != "allocate" and held else None
        if region is None:
            starts = aligned_and_free(free, size, num_tokens)
            result = memory.allocate(wanted)
            assert (result is not None) == bool(starts)
            assert result is None or (result.start in starts and result.num_tokens == size)
        elif operation == "grow":
            more = set(range(region.end, region.start + size))
            can_grow = size <= region.num_tokens or (region.start % size == 0 and more <= free)
            result = memory.grow(region, wanted)
            assert result == ((region.start, max(size, region.num_tokens)) if can_grow else None)
            free.update(range(region.start, region.end))
            result = result or region
        else:
            memory.free(region)
            free.update(range(region.start, region.end))
            result = None
        if result:
            free.difference_update(range(result.start, result.end))
            held.append(result)
        sizes = [s for s in (1, 2, 4, 8, 16, 32, 64) if s >= min_region_tokens]
        assert memory.largest_free == max(
            (size for size in sizes if aligned_and_free(free, size, num_tokens)), default=0
        )
        assert memory.num_free == len(free)
        memory.check_integrity()


def test_sixteen_slots_by_hand():
    """Regions for 3, 2 and 5 tokens take 4 + 2 + 8 = 14 of 16 slots; 4 of them hold nothing.

    |  a a a .  |  b b  |       |  c c c c c . . .  |
    0           4       6       8                   16
    """
    memory = Buddy(16)
    a, b, c = memory.allocate(3), memory.allocate(2), memory.allocate(5)
    assert (a, b, c) == ((0, 4), (4, 2), (8, 8))
    assert sum(region.num_tokens for region in (a, b, c)) - (3 + 2 + 5) == 4
    assert memory.free_regions() == [(6, 2)]
    memory.free(a)
    assert memory.free_regions() == [(0, 4), (6, 2)], "6 free slots, but the buddy of [0, 4) is not whole"
    assert memory.allocate(5) is None
    memory.free(b)
    assert memory.free_regions() == [(0, 8)], "[4, 6) joins [6, 8), then [0, 4)"
    memory.free(c)
    assert memory.free_regions() == [(0, 16)]


def test_free_neighbours_that_are_not_buddies_stay_apart():
    """The middle two of four regions of 2 touch, but belong to different pairs."""
    memory = Buddy(8)
    regions = [memory.allocate(2) for _ in range(4)]
    memory.free(regions[1])
    memory.free(regions[2])
    assert memory.free_regions() == [(2, 2), (4, 2)]
    assert (memory.num_free, memory.largest_free) == (4, 2)
    assert memory.allocate(3) is None


def test_the_smallest_sufficient_piece_is_split():
    """With 4 slots free at 12 and 8 at 0, a region of 2 comes out of the 4."""
    memory = Buddy(16)
    first, _ = memory.allocate(8), memory.allocate(4)
    memory.free(first)
    assert memory.free_regions() == [(0, 8), (12, 4)]
    assert memory.allocate(2) == (12, 2)


def test_only_the_left_of_two_buddies_can_grow():
    """[0, 2) doubles twice into [0, 8); [2, 4) has room behind it, but its buddy lies before it."""
    memory = Buddy(8)
    left, right = memory.allocate(2), memory.allocate(2)
    assert memory.free_regions() == [(4, 4)]
    assert memory.grow(right, 3) is None
    assert memory.grow(left, 3) is None, "its buddy is taken"
    memory.free(right)
    left = memory.grow(left, 5)
    assert left == (0, 8)
    assert memory.num_free == 0
    memory.free(left)
    assert memory.free_regions() == [(0, 8)]


def test_a_right_buddy_does_not_grow_into_a_free_piece_of_the_next_pair():
    """[2, 4) has the free piece [4, 6) of its own size behind it, but [2, 6) is no buddy piece."""
    memory = Buddy(8)
    regions = [memory.allocate(2) for _ in range(4)]
    memory.free(regions[2])
    assert memory.free_regions() == [(4, 2)]
    assert memory.grow(regions[1], 3) is None


def test_among_equal_pieces_the_lowest_address_is_taken():
    memory = Buddy(8)
    regions = [memory.allocate(2) for _ in range(4)]
    memory.free(regions[2])
    memory.free(regions[0])
    assert memory.free_regions() == [(0, 2), (4, 2)]
    assert memory.allocate(2) == (0, 2)


def test_growing_inside_the_rounding_changes_nothing():
    memory = Buddy(8)
    region = memory.allocate(3)
    assert memory.grow(region, 4) is region
    assert memory.num_free == 4


@pytest.mark.parametrize(
    ("num_tokens", "min_region_tokens", "pieces"),
    [(16, 1, [(0, 16)]), (13, 1, [(0, 8), (8, 4), (12, 1)]), (13, 4, [(0, 8), (8, 4)]), (7, 4, [(0, 4)])],
)
def test_memory_is_cut_into_the_powers_of_two_of_its_size(num_tokens, min_region_tokens, pieces):
    """13 = 8 + 4 + 1. What is shorter than the smallest size is free, but in no piece."""
    memory = Buddy(num_tokens, min_region_tokens=min_region_tokens)
    assert memory.free_regions() == pieces
    assert memory.num_free == num_tokens
    memory.check_integrity()


@pytest.mark.parametrize(("num_tokens", "rounded"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16)])
def test_rounds_up_to_a_power_of_two_from_the_smallest_size(num_tokens, rounded):
    memory = Buddy(16, min_region_tokens=4)
    assert memory.rounded(num_tokens) == rounded
    assert memory.allocate(num_tokens).num_tokens == rounded


def test_orca_max_holds_seven_sequences_of_opt_13b_as_the_paper_counts():
    """vLLM paper: 12 GB of KV memory at 800 KB a token, 15.7K slots (Table 1), 2,048 a sequence.

    7.00 batched requests (Figure 13), 8.9% external and others (Figure 2).
    """
    num_tokens = 12 * 2**30 // (800 * 2**10)
    memory = Buddy(num_tokens)
    assert num_tokens == 15_728
    num_seqs = 0
    while memory.allocate(2048):
        num_seqs += 1
    assert num_seqs == 7
    assert memory.num_free == 1_392
    assert memory.largest_free == 1024
    assert round(100 * memory.num_free / num_tokens, 1) == 8.9


@pytest.mark.parametrize("min_region_tokens", [0, 3, -2, 12])
def test_rejects_a_smallest_size_that_is_no_power_of_two(min_region_tokens):
    with pytest.raises(ValueError, match=f"min_region_tokens={min_region_tokens}: must be a power of two"):
        Buddy(64, min_region_tokens=min_region_tokens)


def test_rejects_a_smallest_size_above_the_memory():
    with pytest.raises(ValueError, match="min_region_tokens=16: must be <= num_tokens=13"):
        Buddy(13, min_region_tokens=16)


def test_integrity_check_sees_free_buddies_that_were_not_joined():
    memory = Buddy(8)
    memory._starts[3].clear()
    memory._starts[2].extend([0, 4])
    with pytest.raises(AssertionError):
        memory.check_integrity()
