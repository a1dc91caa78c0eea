"""Several workloads at once: order, tenants, and that nothing of two parts is mixed up."""

import pytest

from policies.core.request import Prompt, Request, Segment
from sim import simulate
from sim.metrics.slo import Slo
from sim.report.lines import traffic_lines
from sim.settings.errors import ConfigError
from sim.workload.agentic import Agentic
from sim.workload.arrivals import Constant
from sim.workload.base import Answers, Arrival, WorkloadNotes
from sim.workload.clients import WithClients
from sim.workload.distributions import Fixed, Lengths, Uniform
from sim.workload.mix import Mix
from sim.workload.modified import WithCallers
from sim.workload.sessions import Conversation
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


def agents(num_tasks=4):
    fixed = {
        "calls": 3,
        "fan_out": 2,
        "sub_agent_calls": 2,
        "tool_s": 0.5,
        "system_prompt_tokens": 50,
        "sub_agent_prompt_tokens": 20,
        "task_tokens": 30,
        "output_tokens": 10,
        "result_tokens": 15,
    }
    lengths = {name: Fixed(value=value) for name, value in fixed.items()}
    return Agentic(
        arrivals=Constant(rate_per_s=1.0), num_tasks=num_tasks, sub_agent_share=0.5, task_slo_s=9.0, **lengths
    )


def simulated(workload, **settings):
    return simulate(workload=workload, model="smollm2_135m", hardware="l4", **{"slo": None} | settings)


def test_each_part_has_its_own_figures():
    clients = WithClients(of=plain(5.0, num=30), streams=False, hidden_share=Uniform(low=0, high=1))
    mix = Mix(parts={"chat": clients, "agents": agents(), "plain": plain(1.0)})
    found = simulated(mix)
    assert list(found.summary["by_part"]) == ["chat", "agents"]
    chat, tasks = found.summary["by_part"]["chat"], found.summary["by_part"]["agents"]["tasks"]
    assert chat["publish"]["count"] == 30
    assert chat["publish"]["mean_s"] == pytest.approx(found.summary["by_tenant"]["chat"]["e2e"]["mean_s"])
    assert (tasks["count"], tasks["finished"]) == (4, 4)
    rows = found.requests[found.requests["tenant"] == "agents"]
    latest = rows.groupby("session_id").agg(begun=("arrival_s", "min"), ended=("finished_s", "max"))
    assert tasks["latency"]["mean_s"] == pytest.approx((latest["ended"] - latest["begun"]).mean())
    assert found.summary["publish"] == found.summary["ttft"], "that of all requests"
    text = "\n".join(traffic_lines(found.summary))
    assert "Part chat: time to publish (complete answers" in text
    assert "Part agents: tasks: 4 of 4 finished" in text


def test_figures_of_a_part_are_those_that_it_has_alone():
    """With another seed, as parts have random numbers of their own, and no other traffic at the same time."""
    hidden = WithClients(of=plain(5.0, num=30), hidden_share=Uniform(low=0, high=1), reading_tokens_per_s=7.0)
    later = Given(Arrival(Request(0, 1e4, Prompt(4, (Segment(0, 4),))), 2))
    for part in (hidden, agents()):
        alone = simulated(part, seed=3).summary
        mixed = simulated(Mix(parts={"later": later, "it": part}), seed=1).summary["by_part"]["it"]
        assert mixed == {name: alone[name] for name in mixed}


def test_an_inner_mix_has_parts_inside_its_part():
    found = simulated(Mix(parts={"outer": Mix(parts={"agents": agents()}), "plain": plain(1.0)}))
    assert found.summary["by_part"]["outer"]["by_part"]["agents"]["tasks"]["finished"] == 4
    assert "Part outer: part agents: tasks: 4 of 4 finished" in "\n".join(traffic_lines(found.summary))


def test_a_mix_of_workloads_without_figures_has_no_section():
    assert "by_part" not in simulated(Mix(parts={"a": plain(1.0), "b": talk()})).summary


def test_tenants_around_parts_with_figures_are_refused():
    mix = Mix(parts={"agents": agents()})
    with pytest.raises(ValueError, match=r"tenants: must be \{\} for a mix whose parts add figures"):
        WithCallers(of=WithClients(of=mix), tenants={"x": 1.0})
    assert WithCallers(of=mix, models={"m": 1.0})
    assert WithCallers(of=Mix(parts={"a": plain(1.0)}), tenants={"x": 1.0})
    with pytest.raises(ValueError, match=r"parts.a/b: must not contain a slash"):
        Mix(parts={"a/b": plain(1.0)})


def test_a_mix_has_the_most_outputs_of_its_parts_and_is_checked_for_them():
    samples, beams = (
        plain(1.0, branching=Answers(width=3)),
        plain(1.0, branching=Answers(width=2, every=1)),
    )
    mix = Mix(parts={"plain": plain(1.0), "samples": samples})
    assert Mix(parts={"a": samples, "b": beams}).branching == Answers(width=3, every=1)
    assert Mix(parts={"a": plain(1.0)}).branching == Answers()
    with pytest.raises(ConfigError, match=r"workload.parts.samples.branching.width=3, engine.max_num_seqs=2"):
        simulated(mix, engine__max_num_seqs=2)
    with pytest.raises(ConfigError, match=r"workload.of.parts.samples.branching.width=3, speculation"):
        simulated(WithClients(of=mix), speculation="ngram")
    by_tenant = simulated(mix, caching="paged").requests.groupby("tenant")["samples"].max()
    assert by_tenant.to_dict() == {"plain": 1, "samples": 3}


def test_an_slo_limits_tasks_and_publication_of_parts():
    """Requests outside of tasks are tasks of their own, and without clients a first token is published."""
    clients = WithClients(of=plain(5.0, num=30), moderation_s=100.0)
    mix = Mix(parts={"chat": clients, "agents": agents(), "plain": plain(1.0)})
    table = simulated(mix, slo=Slo(task_ms=1e6, publish_ms=50e3)).requests
    met = table.groupby("tenant")["slo_met"].mean()
    assert met.to_dict() == {"agents": 1.0, "chat": 0.0, "plain": 1.0}
    rest = table[table["tenant"] != "agents"]
    assert rest["task_s"].tolist() == rest["e2e_s"].tolist()
    rest = table[table["tenant"] != "chat"]
    assert rest["publish_s"].tolist() == rest["ttft_s"].tolist()
