"""S3's queue against its definition, entry by entry."""

from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st

from policies.scheduling.fcfs import Fcfs
from policies.scheduling.s3 import S3

NUM_BLOCKS, BLOCK_SIZE = 12, 4


class Ten:
    """A predictor of ten tokens for every answer."""

    needs_truth: ClassVar[bool] = False

    def predict(self, request, true_num_tokens):
        return 10

    def observe(self, request, num_output_tokens):
        pass


def offered(waiting, window, room, wanted):
    """Returns the ids that are offered by definition: waiting sequences that fit, in the order of their need.

    A sequence that is wanted is taken, and its need is subtracted from the room.
    """
    oldest = sorted(waiting, key=lambda seq: (seq.request.arrival_s, seq.request_id))[:window]
    order = []
    for seq in sorted(
        oldest, key=lambda seq: (-seq.num_prompt_tokens, seq.request.arrival_s, seq.request_id)
    ):
        need = min(-(-(seq.num_prompt_tokens + 10) // BLOCK_SIZE), NUM_BLOCKS)
        if need <= room:
            order.append(seq.request_id)
            room -= need * (seq.request_id in wanted)
    return order


pushes = st.tuples(st.integers(1, 60), st.integers(0, 5))  # prompt tokens, arrival
packings = st.tuples(st.integers(-3, NUM_BLOCKS), st.sets(st.integers(0, 20)))  # room, taken requests


@given(window=st.integers(1, 6), acts=st.lists(st.lists(pushes, max_size=5) | packings, max_size=12))
def test_the_queue_offers_what_its_definition_says(make_core, make_request, window, acts):
    policy = S3(window=window)
    queue = policy.queue()
    policy._memory.num_blocks, policy._memory.block_size = NUM_BLOCKS, BLOCK_SIZE
    makers = make_core(scheduling=Fcfs(), predictor=Ten())
    waiting, num_made = {}, 0
    for act in acts:
        if isinstance(act, list):
            for num_tokens, arrival_s in act:
                seq = waiting[num_made] = makers.add(make_request(num_made, num_tokens, float(arrival_s)))
                num_made += 1
                queue.push(seq)
            continue
        policy._memory.num_unallotted, wanted = act
        expected = offered(waiting.values(), window, *act)
        seen = []
        for seq in queue:
            seen.append(seq.request_id)
            if seq.request_id in wanted:
                queue.remove(waiting.pop(seq.request_id))
        assert seen == expected
        assert len(queue) == len(waiting)


def test_a_request_that_enters_the_window_during_a_pass_is_not_offered(make_core, make_request):
    """A window of one: 0 is taken, 1 takes its place in the window, and is offered the next time."""
    policy = S3(window=1)
    queue = policy.queue()
    policy._memory.num_blocks = policy._memory.num_unallotted = NUM_BLOCKS
    makers = make_core(predictor=Ten())
    for request_id in range(2):
        queue.push(makers.add(make_request(request_id, arrival_s=float(request_id))))
    rounds = []
    for _ in range(2):
        rounds.append([])
        for seq in queue:
            rounds[-1].append(seq.request_id)
            queue.remove(seq)
    assert rounds == [[0], [1]]
