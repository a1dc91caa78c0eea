"""Runs of blocks with contents: find, hold, copy and lose, each block numbered by hand."""

import pytest

from policies.caching.content import PRIVATE_PLACES
from policies.caching.runs import Holding, Runs

PLACE = 5
PATH = [(PLACE, 8)]  # a sequence of one content, 8 blocks long


def hold(runs, owner, num_blocks, ids=()):
    """Offers the first num_blocks blocks as computed by `owner`."""
    held = Holding(PATH)
    held.tail_ids = list(ids)
    runs.offer(held, owner, PLACE, 0, num_blocks)
    return held


def evict(runs, num_blocks):
    runs.num_pending_evictions += num_blocks
    runs.evict_pending()


def found(runs, limit=8):
    return [(run.first, num_blocks) for run, num_blocks in runs.find(PATH, limit)[0]]


def test_what_one_offers_another_finds_up_to_a_limit():
    runs = Runs([])
    hold(runs, 0, 6)
    assert found(runs) == [(0, 6)]
    assert found(runs, limit=4) == [(0, 4)]
    assert runs.find([(9, 8)], 8) == ((), 0)


def test_holding_a_part_cuts_the_run_for_all_its_holders():
    runs = Runs([])
    first, second = hold(runs, 0, 6), Holding(PATH)
    second.found, _ = runs.find(PATH, 4)
    assert runs.hold_found(second, 1) == 0, "none of them was free"
    assert [(run.first, run.num_blocks, sorted(run.owners)) for run in first.runs] == [
        (0, 4, [0, 1]),
        (4, 2, [0]),
    ]
    assert (first.num_with_content, second.num_with_content) == (6, 4)
    assert runs.release(first, 0) == 2
    assert runs.release(second, 1) == 4
    assert runs.check_integrity(set()) == (6, 0)


def test_a_second_computation_is_a_copy_that_is_offered_when_the_original_goes():
    free_ids = []
    runs = Runs(free_ids)
    original = hold(runs, 0, 4, ids=[1, 2, 3, 4])
    copy = hold(runs, 1, 3, ids=[5, 6, 7])
    assert [run.is_copy for run in copy.runs] == [True]
    assert runs.release(original, 0) == 4
    evict(runs, 4)
    assert free_ids == [4, 3, 2, 1], "the end first"
    assert [(run.first, run.num_blocks, run.is_copy) for run in copy.runs] == [(0, 3, False)]
    assert found(runs) == [(0, 3)]
    assert runs.check_integrity(set(copy.runs)) == (0, 3)


def test_eviction_takes_the_end_of_the_run_that_became_free_first():
    runs = Runs([])
    early, late = hold(runs, 0, 2), Holding([(6, 3)])
    runs.offer(late, 1, 6, 0, 3)
    runs.release(late, 1)
    runs.release(early, 0)
    assert runs.next_free.place == 6
    evict(runs, 1)
    assert runs.find(late.path, 8)[1] == 2
    evict(runs, 2)
    assert (runs.next_free.place, runs.places) == (PLACE, {PLACE})


def test_what_is_withdrawn_is_found_no_more():
    free_ids = []
    runs = Runs(free_ids)
    held = hold(runs, 0, 6, ids=range(1, 7))
    runs.withdraw(held, 4)
    assert (found(runs), held.num_with_content, free_ids) == ([(0, 4)], 4, [6, 5])


@pytest.mark.parametrize("num_blocks", [1, 3, 6])
def test_a_second_owner_keeps_its_part_when_the_first_lets_go(num_blocks):
    runs = Runs([])
    held = hold(runs, 0, 6)
    shared = runs.share(held, -1, num_blocks)
    assert (shared.num_with_content, held.num_with_content) == (num_blocks, 6)
    assert runs.release(held, 0) == 6 - num_blocks
    assert runs.check_integrity(set(shared.runs)) == (6 - num_blocks, num_blocks)


def test_integrity_detects_a_run_without_an_owner():
    runs = Runs([])
    hold(runs, 0, 6)
    with pytest.raises(AssertionError, match="a run is lost"):
        runs.check_integrity(set())


def test_a_run_that_only_its_owner_holds_grows_and_one_that_is_shared_does_not():
    runs = Runs([])
    first, second = hold(runs, 0, 2), Holding(PATH)
    runs.extend(first, 0, PLACE, 2, 4)
    assert [(run.first, run.num_blocks) for run in first.runs] == [(0, 4)]
    second.found, _ = runs.find(PATH, 8)
    runs.hold_found(second, 1)
    runs.extend(first, 0, PLACE, 4, 6)
    assert [(run.first, run.num_blocks) for run in first.runs] == [(0, 4), (4, 2)]
    assert (first.num_with_content, second.num_with_content) == (6, 4)


def test_evictions_that_are_put_off_are_carried_out_before_the_next_look():
    runs = Runs([])
    early, late = hold(runs, 0, 4), Holding([(6, 3)])
    runs.offer(late, 1, 6, 0, 3)
    runs.release(early, 0)
    runs.num_pending_evictions = 2
    runs.release(late, 1)
    runs.evict_whole_runs()
    assert runs.num_pending_evictions == 2, "a part of a run waits"
    runs.num_pending_evictions += 3
    assert runs.find([(9, 8)], 8) == ((), 0)
    assert runs.num_pending_evictions == 5, "there are no contents at this place"
    assert found(runs) == []
    assert [(run.place, run.num_blocks) for run, _ in runs.find(late.path, 8)[0]] == [(6, 2)]
    assert runs.num_pending_evictions == 0


OWN = [(PRIVATE_PLACES + 2, 8)]


def hold_own(runs, num_blocks):
    held = Holding(OWN)
    runs.extend(held, 1, OWN[0][0], 0, num_blocks)
    return held


def test_contents_that_only_one_request_can_name_are_counted_and_evicted_in_their_turn():
    runs = Runs([])
    own, other = hold_own(runs, 3), hold(runs, 0, 2)
    runs.extend(own, 1, OWN[0][0], 3, 5)
    assert (own.runs, own.num_private, own.num_with_content) == ([], 5, 5)
    assert (runs.release(own, 1), runs.release(other, 0)) == (5, 2)
    assert runs.check_integrity(set()) == (7, 0)
    evict(runs, 6)
    assert found(runs) == [(0, 1)]
    assert runs.check_integrity(set()) == (1, 0)


def test_a_request_that_comes_again_finds_its_own_contents_where_they_stood_among_the_free():
    runs = Runs([])
    runs.release(hold_own(runs, 5), 1)
    runs.release(hold(runs, 0, 2), 0)
    evict(runs, 1)
    again = Holding(OWN)
    again.found, num_found = runs.find(OWN, 3)
    assert num_found == 3
    assert runs.hold_found(again, 1) == 3
    runs.extend(again, 1, OWN[0][0], 3, 6)
    assert [(run.first, run.num_blocks, run.is_copy) for run in again.runs] == [
        (0, 3, False),
        (3, 1, True),
        (4, 2, False),
    ]
    assert runs.check_integrity(set(again.runs)) == (3, 6)
    assert runs.next_free.first == 3


def test_own_contents_become_a_run_when_their_blocks_are_asked_for():
    runs = Runs([])
    own = hold_own(runs, 4)
    runs.make_private_run(own, 1)
    assert [(run.first, run.num_blocks) for run in own.runs] == [(0, 4)]
    assert (own.num_private, own.num_with_content) == (0, 4)
    assert runs.check_integrity(set(own.runs)) == (0, 4)


def test_own_contents_are_withdrawn_from_their_end():
    runs = Runs([])
    own = hold_own(runs, 4)
    runs.withdraw(own, 1)
    assert (own.num_private, own.num_with_content) == (1, 1)
    assert runs.release(own, 1) == 1
