"""Traffic that is repeated keeps its rate and its lengths, and copies share no content."""

import pytest

from policies.core.request import Prompt, Request, Segment
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.listed import ListedSource, repeated


def source(*times_s):
    made = [
        Arrival(
            Request(
                i, at_s, Prompt(32, (Segment(7 + i % 2, 16),)), session_id=i, answer_id=9, deadline_s=at_s + 1
            ),
            num_output_tokens=4 + i,
        )
        for i, at_s in enumerate(times_s)
    ]
    return ListedSource(made, notes=WorkloadNotes())


def test_copies_follow_at_the_mean_gap_with_other_contents():
    longer = repeated(source(0.0, 2.0, 10.0), 7)
    assert [arrival.at_s for arrival in longer.listed] == [0, 2, 10, 15, 17, 25, 30]
    assert [arrival.request.request_id for arrival in longer.listed] == list(range(7))
    assert [arrival.num_output_tokens for arrival in longer.listed] == [4, 5, 6, 4, 5, 6, 4]
    contents = [arrival.request.prompt.segments[0].content_id for arrival in longer.listed]
    assert contents[0] == contents[2]  # the original shares a prefix
    assert contents[3] == contents[5]  # and so does its copy,
    assert not {*contents[:3]} & {*contents[3:6]}  # but with nothing before it
    assert len({arrival.request.session_id for arrival in longer.listed}) == 7
    assert [arrival.request.deadline_s - arrival.at_s for arrival in longer.listed] == [1] * 7
    assert (longer.num_requests, longer.last_arrival_s) == (7, 30)
    assert repeated(source(0.0, 2.0, 10.0), 2).num_requests == 2


@pytest.mark.parametrize("times_s", [(), (3.0,), (0.0, 0.0)])
def test_a_burst_has_no_rate(times_s):
    with pytest.raises(ValueError, match="have no rate at which they could be repeated"):
        repeated(source(*times_s), 10)
