"""The waiting queue against a sorted list."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.decode_set import DecodeSet
from policies.core.request import Prompt, Request
from policies.core.sequence import FinishReason, Sequence
from policies.core.waiting_queue import WaitingQueue


def make_sequence(request_id, rank=0):
    request = Request(request_id, 0.0, Prompt(4))
    seq = Sequence(request, DecodeSet(8, 4, {}), 100, FinishReason.length, 100)
    seq.rank = (float(rank),)
    return seq


def order(seq):
    return seq.rank, seq.request_id


@given(
    st.lists(st.integers(0, 3), max_size=20),
    st.lists(st.tuples(st.sampled_from(["remove", "push", "take_first", "take_some"]), st.integers(0, 99))),
)
def test_queue_behaves_as_a_sorted_list(ranks, actions):
    queue, held, gone = WaitingQueue(), [], []
    for request_id, rank in enumerate(ranks):
        held.append(make_sequence(request_id, rank))
        queue.push(held[-1])
    for action, number in actions:
        held.sort(key=order)
        if action == "remove" and held:
            gone.append(held.pop(number % len(held)))
            queue.remove(gone[-1])
        elif action == "push" and gone:
            held.append(gone.pop(number % len(gone)))
            queue.push(held[-1])
        elif action == "take_first":  # as an admission loop does: until one does not fit
            for seq in queue:
                if number % 4 == 0:
                    break
                number -= 1
                assert seq is held[0]
                gone.append(held.pop(0))
                queue.remove(seq)
        elif action == "take_some":  # as a policy does that looks behind those it cannot admit
            seen = []
            for seq in queue:
                seen.append(seq)
                if seq.request_id % (number + 1) == 0:
                    queue.remove(seq)
            assert seen == held
            gone += [seq for seq in held if seq.request_id % (number + 1) == 0]
            held = [seq for seq in held if seq.request_id % (number + 1) != 0]
        assert list(queue) == sorted(held, key=order)
        assert len(queue) == len(held)
        assert next(iter(queue), None) is min(held, key=order, default=None)


def test_many_sequences_are_kept_in_order_through_any_changes():
    """3,000 sequences, more than a block holds, pushed and removed in an order that looks random."""
    queue, held = WaitingQueue(), {}
    for number in range(9000):
        request_id = number * 7919 % 3001
        seq = held.pop(request_id, None)
        if seq is None:
            held[request_id] = make_sequence(request_id, rank=request_id * 31 % 17)
            queue.push(held[request_id])
        else:
            queue.remove(seq)
    expected = sorted(held.values(), key=order)
    assert list(queue) == expected
    for seq, following in pairwise(expected):
        assert queue.after(order(seq)) is following
    assert queue.after(order(expected[-1])) is None
    assert queue.after(None) is queue.first is expected[0]


def test_iteration_goes_on_behind_the_last_sequence_whatever_changes():
    queue = WaitingQueue()
    seqs = [make_sequence(request_id) for request_id in range(6)]
    for seq in seqs[:5]:
        queue.push(seq)
    seen = []
    for seq in queue:
        seen.append(seq.request_id)
        if seq is seqs[1]:
            queue.remove(seqs[0])
            queue.remove(seqs[2])
            queue.push(seqs[5])
            queue.push(seqs[0])
    assert seen == [0, 1, 3, 4, 5]


def test_a_rank_without_an_order_is_refused():
    queue = WaitingQueue()
    seqs = [make_sequence(request_id, rank) for request_id, rank in enumerate([5, float("nan"), 3])]
    for seq in seqs:
        queue.push(seq)
    with pytest.raises(ValueError, match="must have an order, so must not be nan"):
        queue.remove(seqs[0])


def test_rejects_removal_of_a_stranger():
    queue = WaitingQueue()
    queue.push(make_sequence(0))
    with pytest.raises(KeyError):
        queue.remove(make_sequence(1))
