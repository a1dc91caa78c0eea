"""Agents: the graph of calls of a task, worked out on paper, and what fails a task."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.request import Segment
from sim.metrics.definitions import Window
from sim.metrics.tasks import TasksFigure
from sim.workload.agentic import Agentic
from sim.workload.arrivals import AllAtOnce, ClosedLoop, Constant
from sim.workload.distributions import Exponential, Fixed, Geometric, Uniform
from tests.examples import examples


def make(**given_settings):
    given_all = {
        "arrivals": Constant(rate_per_s=0.01),
        "num_tasks": 1,
        "calls": Fixed(value=2),
        "fan_out": Fixed(value=1),
        "sub_agent_share": 0.0,
        "sub_agent_calls": Fixed(value=2),
        "tool_s": Fixed(value=3.0),
        "system_prompt_tokens": Fixed(value=100),
        "sub_agent_prompt_tokens": Fixed(value=40),
        "task_tokens": Fixed(value=10),
        "output_tokens": Fixed(value=5),
        "result_tokens": Fixed(value=7),
    }
    return Agentic(**(given_all | given_settings))


def run(workload, service_s=1.0, max_model_len=10_000, order=min):
    """Plays a workload to its end; every call takes service_s. Returns its calls with their ends, by end."""
    source = workload.source(seed=0, max_model_len=max_model_len)
    pending, done = list(source.arrivals()), []
    while pending:
        first = order(pending, key=lambda a: (a.request.arrival_s, a.request.request_id))
        pending.remove(first)
        end_s = first.request.arrival_s + service_s
        done.append((first.request, end_s))
        pending += source.follow_ups(first.request, end_s, first.num_output_tokens)
    return done, source


def test_a_chain_with_tools_waits_for_the_longest_and_its_context_grows():
    """Call 0 ends at 1 s, two tools take 3 s, call 1 begins at 4 s with both results."""
    done, source = run(make(fan_out=Fixed(value=2)))
    assert [request.arrival_s for request, _ in done] == [0.0, 4.0]
    first, second = (request.prompt for request, _ in done)
    assert first.num_tokens == 100 + 10
    assert second.num_tokens == 110 + 5 + 2 * 7
    assert second.segments[: len(first.segments)] == first.segments
    assert second.segments[2] == Segment(done[0][0].answer_id, 5)
    assert source.num_requests == 2


def test_sub_agents_run_in_parallel_and_the_agent_joins_them():
    """Two sub-agents begin at 1 s; each: call (1 s), tool (3 s), call (1 s); the agent goes on at 6 s."""
    done, source = run(make(fan_out=Fixed(value=2), sub_agent_share=1.0))
    assert [request.arrival_s for request, _ in done] == [0.0, 1.0, 1.0, 5.0, 5.0, 6.0]
    prompts = [request.prompt.num_tokens for request, _ in done]
    assert prompts == [110, 50, 50, 40 + 10 + 5 + 7, 62, 110 + 5 + 2 * 7]
    assert source.num_requests == 6
    assert {request.session_id for request, _ in done} == {0}


def test_sub_agents_of_sub_agents_are_joined_by_their_own_agent():
    """Level 1 calls at 1 s; level 2 takes from 2 to 7 s (call, tool, call); level 1 calls again until 8 s."""
    done, source = run(make(sub_agent_share=1.0, sub_agent_depth=2))
    assert [request.arrival_s for request, _ in done] == [0.0, 1.0, 2.0, 6.0, 7.0, 8.0]
    assert source.num_requests == 6
    assert done[4][0].prompt.segments[:2] == done[1][0].prompt.segments, "level 1 goes on with its context"
    assert make(sub_agent_share=1.0).plans(0, 1)[0].num_calls == 4


def test_later_calls_of_a_task_have_more_priority():
    for is_set, expected in [(True, [0, -1, -2]), (False, [0, 0, 0])]:
        done, _ = run(make(calls=Fixed(value=3), later_calls_first=is_set))
        assert [request.priority for request, _ in done] == expected


def test_tasks_of_too_many_calls_are_refused():
    many = {"calls": Fixed(value=50), "sub_agent_calls": Fixed(value=50), "fan_out": Fixed(value=50)}
    with pytest.raises(ValueError, match=r"sub_agent_depth=3: a task has more than 100,000 calls; lower it"):
        make(**many, sub_agent_share=1.0, sub_agent_depth=3).plans(0, 1)
    with pytest.raises(ValueError, match=r"sub_agent_depth=0: must be >= 1 and <= 10 levels"):
        make(sub_agent_depth=0)


@examples(10, 30)
@given(st.integers(0, 1000), st.floats(0.0, 1.0), st.booleans(), st.integers(1, 3))
def test_every_planned_call_is_sent_once_in_any_order(seed, share, reverse, depth):
    workload = make(
        arrivals=AllAtOnce(),
        num_tasks=3,
        calls=Geometric(mean=3.0),
        fan_out=Uniform(low=1, high=3),
        sub_agent_share=share / depth,
        sub_agent_depth=depth,
        sub_agent_calls=Geometric(mean=2.0),
        tool_s=Exponential(mean=2.0),
    )
    plans = workload.plans(seed, 3)
    source = workload.source(seed=seed, max_model_len=10**6)
    pending, sent = list(source.arrivals()), []
    while pending:
        arrival = pending.pop(-1 if reverse else 0)
        sent.append(arrival.request)
        pending += source.follow_ups(
            arrival.request, arrival.request.arrival_s + 1.0, arrival.num_output_tokens
        )
    assert sorted(request.request_id for request in sent) == list(range(source.num_requests))
    for task, plan in enumerate(plans):
        assert sum(request.session_id == task for request in sent) == plan.num_calls
    answers = [request.answer_id for request in sent]
    assert len(set(answers)) == len(answers)
    for request in sent:
        assert sum(s.num_tokens for s in request.prompt.segments) == request.prompt.num_tokens


def test_a_task_fails_with_a_rejected_call_and_ends_where_the_context_is_full():
    source = make().source(seed=0, max_model_len=1000)
    (first,) = source.arrivals()
    assert not source.follow_ups(first.request, 1.0, 0)
    done, source = run(make(calls=Fixed(value=9)), max_model_len=130)
    assert len(done) == 2, "the third prompt would have 110 + 2 (5 + 7) = 134 tokens"
    assert source.notes.num_conversations_cut == 1
    done, source = run(make(), max_model_len=50)
    assert not done
    assert source.notes.skipped == {"tasks with a first call longer than the context": 1}


def test_task_latency_makespan_and_slo():
    """Task 0 ends after 6 s, task 1 after 4 s, task 2 lacks a call, task 3 begins after the window."""
    requests = pd.DataFrame(
        {
            "session_id": [0, 0, 1, 2, 3],
            "arrival_s": [1.0, 4.0, 2.0, 3.0, 99.0],
            "finished_s": [3.0, 7.0, 6.0, 5.0, 100.0],
            "status": ["finished"] * 5,
        }
    )
    tasks = TasksFigure(lambda: np.array([2, 1, 2, 1]), 5.0)
    tasks.add(SimpleNamespace(requests=requests))
    found = tasks.value(Window(0.0, 50.0))["tasks"]
    assert (found["count"], found["finished"], found["not_finished"]) == (3, 2, 1)
    assert (found["latency"]["mean_s"], found["latency"]["max_s"]) == (5.0, 6.0)
    assert found["makespan_s"] == 6.0
    assert found["slo_share"] == pytest.approx(1 / 3)
    assert found["calls_per_task"] == pytest.approx(5 / 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sub_agent_share": 1.5}, "sub_agent_share=1.5: must be a share"),
        ({"num_tasks": None}, "at least one must be set"),
        ({"fan_out": Fixed(value=0)}, "fan_out.value=0: must be >= 1"),
        (
            {"arrivals": ClosedLoop(num_users=1), "num_tasks": None, "duration_s": 60.0},
            "num_tasks=null: must be set with arrivals by a closed loop",
        ),
        ({"task_slo_s": 0.0}, "task_slo_s=0.0: must be finite and > 0"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        make(**wrong)
