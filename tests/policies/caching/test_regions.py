"""Contiguous regions: promises of every allocator, slot by slot, and the places of first and best fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.caching.regions import Buddy, FirstFit, Region, must_tile

ALLOCATORS = {
    "first_fit": lambda num_tokens: FirstFit(num_tokens),
    "best_fit": lambda num_tokens: FirstFit(num_tokens, best_fit=True),
    "buddy": lambda num_tokens: Buddy(num_tokens),
    "buddy_from_4": lambda num_tokens: Buddy(num_tokens, min_region_tokens=4),
}
every_allocator = pytest.mark.parametrize("make", ALLOCATORS.values(), ids=ALLOCATORS.keys())

NUM_TOKENS = st.integers(4, 70)
# What to do, to which of the regions held, how many tokens: small ones too, so that many are held.
SIZES = st.one_of(st.integers(1, 4), st.integers(1, 40))
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "allocate", "grow", "free"]), st.integers(0, 9), SIZES),
    max_size=40,
)


def slots(region):
    return set(range(region.start, region.end))


def runs(free):
    """Returns the maximal runs of a set of slots, by address."""
    found = []
    for slot in sorted(free):
        if found and found[-1].end == slot:
            found[-1] = Region(found[-1].start, found[-1].num_tokens + 1)
        else:
            found.append(Region(slot, 1))
    return found


def replay(memory, operations):
    """Replays operations; yields (operation, region before, tokens asked, result, free slots before)."""
    held, free = [], set(range(memory.num_tokens))
    for operation, which, num_tokens in operations:
        before = set(free)
        region = held.pop(which % len(held)) if operation != "allocate" and held else None
        if region is None:
            operation, result = "allocate", memory.allocate(num_tokens)
        elif operation == "grow":
            result = memory.grow(region, num_tokens)
        else:
            result = memory.free(region)
        kept = result or (region if operation == "grow" else None)
        free |= slots(region) if region else set()
        if kept:
            assert slots(kept) <= free, "a slot has two owners, or lies outside the memory"
            free -= slots(kept)
            held.append(kept)
        assert memory.num_free == len(free)
        memory.check_integrity()
        yield operation, region, num_tokens, result, before


@every_allocator
@given(num_tokens=NUM_TOKENS, operations=OPERATIONS)
def test_regions_never_overlap_and_grow_keeps_the_start(make, num_tokens, operations):
    """`replay` tracks the owner of each slot."""
    for operation, region, wanted, result, _ in replay(make(num_tokens), operations):
        if operation != "free" and result is not None:
            assert result.num_tokens >= wanted
        if operation == "grow" and result is not None:
            assert result.start == region.start
            assert result.num_tokens >= region.num_tokens


@every_allocator
@given(num_tokens=NUM_TOKENS, operations=OPERATIONS, wanted=st.integers(1, 80))
def test_allocate_succeeds_exactly_when_the_largest_piece_is_long_enough(
    make, num_tokens, operations, wanted
):
    memory = make(num_tokens)
    for _ in replay(memory, operations):
        pass
    largest, free = memory.largest_free, memory.free_regions()
    region = memory.allocate(wanted)
    assert (region is not None) == (wanted <= largest)
    if region is None:
        assert memory.free_regions() == free


@every_allocator
@given(num_tokens=NUM_TOKENS, operations=OPERATIONS)
def test_freeing_all_restores_the_empty_memory(make, num_tokens, operations):
    memory, empty = make(num_tokens), make(num_tokens).free_regions()
    held = []
    for operation, region, _, result, _ in replay(memory, operations):
        if region is not None and (operation == "free" or result is not None):
            held.remove(region)
        if result is not None:
            held.append(result)
    for region in held:
        memory.free(region)
        memory.check_integrity()
    assert memory.free_regions() == empty
    assert memory.num_free == num_tokens


@every_allocator
@given(num_tokens=NUM_TOKENS, wishes=st.lists(st.tuples(st.booleans(), st.integers(0, 9), SIZES)))
def test_what_was_refused_stays_refused_while_nothing_is_freed(make, num_tokens, wishes):
    """Fewest tokens refused so far, by start of the region that wanted to grow (None: a new one)."""
    memory, held, refused = make(num_tokens), [], {}
    for is_growth, which, wanted in wishes:
        region = held.pop(which % len(held)) if is_growth and held else None
        result = memory.grow(region, wanted) if region else memory.allocate(wanted)
        start = region.start if region else None
        if result is None:
            refused[start] = min(wanted, refused.get(start, wanted))
        assert result is None or wanted < refused.get(start, 1000)
        held += [result or region] if result or region else []


@given(num_tokens=NUM_TOKENS, operations=OPERATIONS, best_fit=st.booleans())
def test_first_and_best_fit_place_as_a_search_of_every_slot_does(num_tokens, operations, best_fit):
    memory = FirstFit(num_tokens, best_fit=best_fit)
    for operation, region, wanted, result, free in replay(memory, operations):
        if operation == "allocate":
            fitting = [run for run in runs(free) if run.num_tokens >= wanted]
            key = (lambda run: (run.num_tokens, run.start)) if best_fit else (lambda run: run.start)
            chosen = min(fitting, key=key, default=None)
            assert result == (chosen and Region(chosen.start, wanted))
        elif operation == "grow":
            there = wanted <= region.num_tokens or set(range(region.end, region.start + wanted)) <= free
            assert result == (Region(region.start, max(wanted, region.num_tokens)) if there else None)


@pytest.mark.parametrize(("best_fit", "start"), [(False, 0), (True, 9)])
def test_first_fit_takes_the_lowest_hole_and_best_fit_the_tightest(best_fit, start):
    """20 slots with holes of 5 at 0, 3 at 9 and 4 at 16: 12 free, yet no region of 6.

    | hole 5 |  4  | hole 3 |  4  | hole 4 |
    0        5     9        12    16       20
    """
    memory = FirstFit(20, best_fit=best_fit)
    first, _, second, _, third = [memory.allocate(num_tokens) for num_tokens in (5, 4, 3, 4, 4)]
    for region in (first, second, third):
        memory.free(region)
    assert memory.free_regions() == [(0, 5), (9, 3), (16, 4)]
    assert (memory.num_free, memory.largest_free) == (12, 5)
    assert memory.allocate(6) is None
    assert memory.allocate(3) == (start, 3)


def test_a_freed_region_joins_the_pieces_on_both_sides():
    memory = FirstFit(12)
    left, middle, right = memory.allocate(4), memory.allocate(4), memory.allocate(4)
    assert (memory.num_free, memory.largest_free) == (0, 0)
    memory.free(left)
    memory.free(right)
    assert memory.free_regions() == [(0, 4), (8, 4)]
    memory.free(middle)
    assert memory.free_regions() == [(0, 12)]


def test_a_region_grows_into_the_free_slots_behind_it_and_no_further():
    """10 slots: a has 3, b has 4 behind it. a cannot grow; b can, by 3; once b is gone a takes all."""
    memory = FirstFit(10)
    a, b = memory.allocate(3), memory.allocate(4)
    assert memory.grow(a, 4) is None
    assert memory.grow(b, 8) is None
    b = memory.grow(b, 7)
    assert b == (3, 7)
    assert memory.grow(b, 2) == b, "a region is not shortened"
    memory.free(b)
    assert memory.grow(a, 10) == (0, 10)
    assert memory.num_free == 0


@every_allocator
def test_rejects_a_region_that_is_not_allocated(make):
    memory = make(16)
    region = memory.allocate(4)
    grown = memory.grow(region, 8)
    for use in (memory.free, lambda old: memory.grow(old, 16)):
        with pytest.raises(ValueError, match=r"region=\(0, 4\): must be allocated"):
            use(region)
    memory.free(grown)
    with pytest.raises(ValueError, match=r"region=\(0, 8\): must be allocated"):
        memory.free(grown)
    assert memory.num_free == 16


@every_allocator
def test_rejects_less_than_one_token(make):
    memory = make(16)
    region = memory.allocate(4)
    for use in (make, memory.allocate, lambda num_tokens: memory.grow(region, num_tokens)):
        with pytest.raises(ValueError, match="num_tokens=0: must be >= 1 token"):
            use(0)


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ([(0, 4), (5, 5)], "gap or overlap between slot 4"),
        ([(0, 4), (3, 7)], "gap or overlap between slot 4"),
        ([(0, 4), (4, 5)], "end at slot 9, the memory at 10"),
        ([(0, 4), (4, 0), (4, 6)], "is empty"),
    ],
)
def test_integrity_check_sees_gaps_overlaps_and_missing_slots(regions, message):
    with pytest.raises(AssertionError, match=message):
        must_tile([Region(*region) for region in regions], 10)


def test_integrity_check_sees_pieces_that_were_not_joined():
    memory = FirstFit(8)
    memory._drop(0)
    memory._add(0, 3)
    memory._add(3, 5)
    with pytest.raises(AssertionError):
        memory.check_integrity()
