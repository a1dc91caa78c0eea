"""One traffic for simulator and engine: at the rate of the load, with the answer lengths of the clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.validate.engine.traffic import Paced, at_load, exact
from policies.core.request import Prompt, Request
from sim.settings.scenario import build_scenario
from sim.workload.arrivals import AllAtOnce, ClosedLoop, Poisson
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.distributions import Fixed, Lengths
from sim.workload.synthetic import Synthetic
from tests.experiments.validate.engine.engine_runs import run_engine, scenario_of

torch.set_num_threads(1)

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])


def workload_of(*overrides):
    return build_scenario(SOURCE.compose(["model=random_8m", "model.dtype=fp32", *overrides])).workload


def drawn(*overrides):
    """Draws 20 requests that fit into the small model's context."""
    return workload_of(
        "workload=validation",
        "workload.num_requests=20",
        "workload.lengths.prompt_tokens.mean=30",
        "workload.lengths.output_tokens.mean=6",
        *overrides,
    )


class Talk:
    """A workload of two requests: the second follows 2 s after the first has ended, due in 5 s more."""

    num_requests, last_arrival_s, patience_s, notes = 2, None, 7.0, WorkloadNotes()

    def source(self, *, seed, max_model_len):
        return self

    def arrivals(self):
        yield Arrival(Request(0, 3.0, Prompt(5), deadline_s=4.0), 6)

    def follow_ups(self, request, now, num_output_tokens):
        if request.request_id:
            return ()
        return (Arrival(Request(1, now + 2.0, Prompt(5), deadline_s=now + 7.0), 9),)


def test_stretched_traffic_takes_longer_between_requests_and_asks_for_what_it_gets():
    """Three times as slow: 9 s instead of 3; after an end at 20 s, 26 instead of 22. Deadlines move along."""
    source = Paced(workload=Talk(), stretch=3.0).source(seed=0, max_model_len=100)
    (first,) = source.arrivals()
    assert (first.request.arrival_s, first.request.deadline_s) == (9.0, 10.0)
    assert (first.num_output_tokens, first.request.max_tokens) == (6, 6)
    (second,) = source.follow_ups(first.request, 20.0, 6)
    assert (second.request.arrival_s, second.request.deadline_s) == (26.0, 31.0)
    assert (second.num_output_tokens, second.request.max_tokens) == (9, 9)
    assert not source.follow_ups(second.request, 40.0, 9)
    assert (source.num_requests, source.last_arrival_s, source.patience_s) == (2, None, 7.0)


def test_at_its_own_pace_nothing_moves():
    workload = drawn("workload.deadlines_s=[0.5]", "workload.max_tokens=null")
    scenario = exact(scenario_of(workload=workload))
    own = list(workload.source(seed=0, max_model_len=128).arrivals())
    paced = list(scenario.source().arrivals())
    assert [one.request.arrival_s for one in paced] == [one.request.arrival_s for one in own]
    assert [one.request.prompt for one in paced] == [one.request.prompt for one in own]
    assert all(one.request.deadline_s - one.request.arrival_s == pytest.approx(0.5) for one in paced)
    assert {one.request.max_tokens for one in own} == {None}
    assert [one.request.max_tokens for one in paced] == [one.num_output_tokens for one in own]


def test_at_half_the_load_requests_take_twice_as_long_to_come():
    scenario = scenario_of(workload=drawn(), host_s=1e-3)
    own = np.array([one.request.arrival_s for one in scenario.source().arrivals()])
    last_s = {}
    for load in (2.0, 1.0, 0.5):
        arrivals = [one.request.arrival_s for one in at_load(scenario, load).source().arrivals()]
        np.testing.assert_allclose(arrivals, own * (arrivals[-1] / own[-1]))  # in the same rhythm
        last_s[load] = arrivals[-1]
    assert last_s[1.0] == pytest.approx(2 * last_s[2.0])
    assert last_s[0.5] == pytest.approx(2 * last_s[1.0])


def equal_requests(arrivals, *, num_prompt_tokens=30, num_output_tokens=7):
    lengths = Lengths(
        prompt_tokens=Fixed(value=num_prompt_tokens), output_tokens=Fixed(value=num_output_tokens)
    )
    return Synthetic(arrivals=arrivals, lengths=lengths, num_requests=20)


def test_at_full_load_requests_take_as_long_to_come_as_to_be_served_when_all_are_there():
    """One at a time, 7 iterations each, a little more than the host's 10 ms: 20 requests take 1.4 s."""
    scenario = scenario_of(workload=equal_requests(Poisson(rate_per_s=2.0)), host_s=10e-3)
    scenario = replace(scenario, engine=replace(scenario.engine, max_num_seqs=1))
    *_, last = at_load(scenario, 1.0).source().arrivals()
    assert last.request.arrival_s == pytest.approx(20 * 7 * 10e-3, rel=0.05)


def test_conversations_are_paced_by_what_people_take_to_think():
    workload = workload_of(
        "workload=conversation",
        "workload.num_conversations=6",
        "workload.turns.mean=3",
        "workload.system_prompt_tokens.value=8",
        "workload.message_tokens.mean=10",
        "workload.answer_tokens.mean=5",
    )
    scenario = scenario_of(workload=workload, host_s=1e-3)
    ends_s = []
    for load in (1.0, 0.1):
        paced = at_load(scenario, load)
        table = paced.simulate(paced.source()).requests
        assert len(table) > 6
        assert set(table["status"]) == {"finished"}
        ends_s.append(table["arrival_s"].max())
    assert 5 < ends_s[1] / ends_s[0] < 11


@pytest.mark.parametrize(
    "arrivals",
    [AllAtOnce(), ClosedLoop(num_users=2, think_time_s=Fixed(value=0))],
    ids=["a crowd", "users without think time"],
)
def test_what_leaves_no_time_between_requests_cannot_be_paced(arrivals):
    scenario = scenario_of(workload=equal_requests(arrivals), host_s=1e-3)
    with pytest.raises(ValueError, match=r"^load=0.6: the workload's requests arrive all at once.*load=null"):
        at_load(scenario, 0.6)


def test_what_is_never_answered_gives_no_load():
    """Prompts of 60 tokens do not fit into two blocks of 16."""
    workload = equal_requests(Poisson(rate_per_s=2.0), num_prompt_tokens=60)
    with pytest.raises(ValueError, match="load=1: the simulated engine finishes none of the requests"):
        at_load(scenario_of(workload=workload, num_kv_blocks=2), 1.0)


def test_both_worlds_serve_the_same_requests():
    """Ids and lengths are equal, and, at so low a load that no request queues, arrival times."""
    scenario = at_load(scenario_of(workload=drawn("workload.priority_shares=[0.5,0.5]")), 1e-4)
    real = run_engine(scenario, scenario.source()).requests
    simulated = scenario.simulate(scenario.source()).in_pandas().requests
    columns = ["request_id", "prompt_tokens", "output_tokens", "priority", "status", "samples"]
    assert real[columns].equals(simulated[columns])
    since_first = real["arrival_s"] - real["arrival_s"].iloc[0]
    np.testing.assert_allclose(
        since_first, simulated["arrival_s"] - simulated["arrival_s"].iloc[0], atol=1e-9
    )
