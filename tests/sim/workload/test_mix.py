"""Several workloads at once: order, tenants, and that nothing of two parts is mixed up."""

import pytest

from policies.core.request import Prompt, Request, Segment
from sim.workload.arrivals import Constant
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.conversation import Conversation
from sim.workload.distributions import Fixed
from sim.workload.lengths import Lengths
from sim.workload.marked import WithCallers
from sim.workload.mix import Mix
from sim.workload.synthetic import Synthetic


def plain(rate_per_s, num=3, **settings):
    lengths = Lengths(prompt_tokens=Fixed(value=9), output_tokens=Fixed(value=4))
    return Synthetic(arrivals=Constant(rate_per_s=rate_per_s), lengths=lengths, num_requests=num, **settings)


def talk():
    return Conversation(
        arrivals=Constant(rate_per_s=1.0),
        turns=Fixed(value=2),
        message_tokens=Fixed(value=10),
        answer_tokens=Fixed(value=5),
        think_time_s=Fixed(value=1.0),
        num_conversations=2,
        system_prompt_tokens=Fixed(value=3),
    )


class Given:
    """A workload of these arrivals."""

    num_requests, last_arrival_s, patience_s = None, None, None

    def __init__(self, *arrivals):
        self.notes = WorkloadNotes()
        self._arrivals = arrivals

    def source(self, *, seed, max_model_len):
        return self

    def arrivals(self):
        yield from self._arrivals

    def follow_ups(self, request, now, num_output_tokens):
        return ()


def test_parts_are_merged_by_time_and_numbered_in_order():
    mix = Mix(parts={"fast": plain(2.0), "slow": plain(1.0)}, priorities={"slow": 3})
    source = mix.source(seed=0, max_model_len=100)
    sent = [a.request for a in source.arrivals()]
    assert [r.arrival_s for r in sent] == [0.0, 0.0, 0.5, 1.0, 1.0, 2.0]
    assert [r.tenant for r in sent] == ["fast", "slow", "fast", "fast", "slow", "slow"]
    assert [r.priority for r in sent] == [0, 3, 0, 0, 3, 3]
    assert [r.request_id for r in sent] == list(range(6))
    assert (source.num_requests, source.last_arrival_s) == (6, 2.0)


def test_follow_ups_go_to_the_part_of_the_request():
    source = Mix(parts={"a": talk(), "b": talk()}).source(seed=0, max_model_len=100)
    first = [a.request for a in source.arrivals()]
    later = [source.follow_ups(request, 10.0, 5)[0].request for request in first]
    for before, after in zip(first, later, strict=True):
        assert (after.tenant, after.session_id) == (before.tenant, before.session_id)
        assert after.prompt.segments[: len(before.prompt.segments)] == before.prompt.segments
        assert after.prompt.segments[2].content_id == before.answer_id
        assert not source.follow_ups(after, 20.0, 5)
    assert len({r.session_id for r in first}) == 4
    contents = [{s.content_id for s in r.prompt.segments} for r in later]
    assert not contents[0] & contents[1], "contents of two parts are different"
    assert source.num_requests == 8


def test_a_part_keeps_its_patience_and_its_tenants():
    request = Request(0, 1.0, Prompt(4, (Segment(0, 4),)), tenant="client-3")
    mix = Mix(parts={"calm": Given(Arrival(request, 2)), "hasty": plain(1.0, num=1, patience_s=5.0)})
    hasty, calm = mix.source(seed=0, max_model_len=100).arrivals()
    assert (hasty.request.tenant, hasty.gives_up_s) == ("hasty", 5.0)
    assert (calm.request.tenant, calm.gives_up_s) == ("calm/client-3", None)


def test_notes_are_those_of_all_parts():
    source = Mix(parts={"a": plain(1.0), "b": plain(1.0)}).source(seed=0, max_model_len=8)
    assert source.notes.num_clipped == 6


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"parts=\{\}: must name at least one workload"):
        Mix(parts={})
    with pytest.raises(ValueError, match=r"priorities.other: must be one of the parts a"):
        Mix(parts={"a": plain(1.0)}, priorities={"other": 1})


def test_a_part_with_models_of_its_own_is_refused():
    callers = WithCallers(of=plain(1.0), models={"llama-3.1-8b": 1.0})
    with pytest.raises(ValueError, match=r"parts.a: must not name models, .* workload=callers"):
        Mix(parts={"a": callers})
