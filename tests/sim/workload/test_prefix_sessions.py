"""Sessions with shared prefixes: the tree of prompts, and the published figures of Mooncake's traces."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from policies.core.request import Segment
from sim.workload.arrivals import ClosedLoop, Constant
from sim.workload.distributions import Fixed
from sim.workload.formats import MooncakeJsonl
from sim.workload.prefix_sessions import PrefixSessions
from tests.sim.workload.test_conversation import run

TRACE = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces" / "mooncake_conversation.jsonl.gz"


def make(**settings):
    given = {
        "arrivals": Constant(rate_per_s=0.1),
        "turns": Fixed(value=3),
        "first_tokens": Fixed(value=50),
        "turn_tokens": Fixed(value=20),
        "output_tokens": Fixed(value=7),
        "gap_s": Fixed(value=4.0),
        "system_prompt_tokens": Fixed(value=100),
        "duration_s": 10.0,
        "running_s": 0.0,
    }
    return PrefixSessions(**(given | settings))


def shipped(name):
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose([f"workload={name}"])
    return instantiate(OmegaConf.to_container(cfg.workload, resolve=True))


def found_share(arrivals):
    """Returns the share of prompt tokens that a cache without a limit would find."""
    seen, found, total = set(), 0, 0
    for arrival in arrivals:
        path, is_known = (), True
        for segment in arrival.request.prompt.segments:
            path = hash((path, segment))
            is_known = is_known and path in seen
            found += segment.num_tokens if is_known else 0
            seen.add(path)
        total += arrival.request.prompt.num_tokens
    return found / total


def test_a_session_grows_turn_by_turn_at_its_own_times():
    sent = list(make().source(seed=0, max_model_len=1000).arrivals())
    assert [(a.request.arrival_s, a.request.prompt.num_tokens) for a in sent] == [
        (0, 150),
        (4, 170),
        (8, 190),
    ]
    for earlier, later in pairwise(a.request.prompt.segments for a in sent):
        assert later[:-1] == earlier
        assert later[-1].num_tokens == 20
    assert {a.request.session_id for a in sent} == {0}
    assert {a.num_output_tokens for a in sent} == {7}


def test_sessions_share_their_system_prompt_and_nothing_else():
    sent = make(duration_s=20.0, turns=Fixed(value=1)).source(seed=0, max_model_len=1000).arrivals()
    one, other = (a.request.prompt.segments for a in sent)
    assert one[0] == other[0] == Segment(0, 100)
    assert one[1].content_id != other[1].content_id


def test_sessions_that_are_running_at_the_start_send_later_turns():
    """One session begins 10 s before the traffic, so that its turns 0, 1, 2 come at -10, -6, -2 s."""
    sent = list(make(running_s=10.0, gap_s=Fixed(value=6.0)).source(seed=0, max_model_len=1000).arrivals())
    assert [(a.request.arrival_s, a.request.prompt.num_tokens) for a in sent] == [
        (0, 150),
        (2, 190),
        (6, 170),
    ]


def test_a_prompt_longer_than_the_context_is_clipped_with_its_content():
    source = make().source(seed=0, max_model_len=160)
    sent = list(source.arrivals())
    assert [a.request.prompt.num_tokens for a in sent] == [150, 153, 153]
    for arrival in sent:
        assert sum(s.num_tokens for s in arrival.request.prompt.segments) == arrival.request.prompt.num_tokens
    assert source.notes.num_clipped == 2


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output", "hits"),
    [("mooncake_like", 12_031, 12_035, 343, 0.40), ("mooncake_toolagent_like", 23_608, 8_596, 182, 0.59)],
)
def test_mooncakes_published_figures(name, requests, prompt, output, hits):
    """Qin et al., "Mooncake", FAST 2025: requests of an hour, mean lengths, hit rate without a limit."""
    sent = list(shipped(name).source(seed=0, max_model_len=131_072).arrivals())
    assert len(sent) == pytest.approx(requests, rel=0.05)
    assert np.mean([a.request.prompt.num_tokens for a in sent]) == pytest.approx(prompt, rel=0.05)
    assert np.mean([a.num_output_tokens for a in sent]) == pytest.approx(output, rel=0.03)
    assert found_share(sent) == pytest.approx(hits, abs=0.025)


@pytest.mark.skipif(not TRACE.exists(), reason="the Mooncake trace is not on this machine")
def test_the_traffic_resembles_the_trace():
    """The longer half of the prompts does; the shortest quarter is longer than in the trace."""
    made, real = (
        list(workload.source(seed=0, max_model_len=131_072).arrivals())
        for workload in (shipped("mooncake_like"), MooncakeJsonl(path=TRACE))
    )
    lengths = [[a.request.prompt.num_tokens for a in of] for of in (made, real)]
    ours, theirs = (np.percentile(one, (50, 75, 90)) for one in lengths)
    assert ours == pytest.approx(theirs, rel=0.15)
    assert found_share(made) == pytest.approx(found_share(real), abs=0.04)


def test_a_closed_loop_begins_a_session_when_another_has_ended():
    """Its turns keep their gaps, their contents and their lengths; max_requests cuts the last session."""
    loop = ClosedLoop(num_users=2, think_time_s=Fixed(value=1.0))
    workload = make(arrivals=loop, max_requests=8, duration_s=1000.0, running_s=500.0)
    sent = [one.request for one in run(workload.source(seed=0, max_model_len=1000))]
    by_session = [[one for one in sent if one.session_id == session] for session in range(3)]
    assert [[one.arrival_s - own[0].arrival_s for one in own] for own in by_session] == [
        [0.0, 4.0, 8.0],
        [0.0, 4.0, 8.0],
        [0.0, 4.0],
    ]
    assert [own[0].arrival_s for own in by_session] == [0.0, 0.0, 8.0 + 1.0 + 1.0]  # answer, pause
    assert [one.prompt.num_tokens for one in by_session[0]] == [150, 170, 190]
    for own in by_session:
        for earlier, later in pairwise(one.prompt.segments for one in own):
            assert later[:-1] == earlier


def test_a_closed_loop_begins_no_session_after_its_duration():
    loop = ClosedLoop(num_users=1, think_time_s=Fixed(value=1.0))
    workload = make(arrivals=loop, max_requests=100, duration_s=25.0)
    sent = [one.request for one in run(workload.source(seed=0, max_model_len=1000))]
    assert [one.arrival_s for one in sent][::3] == [0.0, 10.0, 20.0]


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="max_requests=null: must be set with arrivals by a closed loop"):
        make(arrivals=ClosedLoop(num_users=1, think_time_s=Fixed(value=1.0)))
    with pytest.raises(ValueError, match=r"turns.value=0: must be >= 1"):
        make(turns=Fixed(value=0))
    with pytest.raises(ValueError, match=r"num_system_prompts=10000000: must be <= 1e\+06"):
        make(num_system_prompts=10_000_000)
    with pytest.raises(ValueError, match="no request arrives in this time"):
        make(arrivals=Constant(rate_per_s=1e-3), running_s=5.0, duration_s=1.0).source(
            seed=0, max_model_len=99
        )


def test_more_sessions_than_memory_holds_are_refused(monkeypatch):
    monkeypatch.setattr("sim.workload.prefix_sessions.MAX_SESSIONS", 100)
    with pytest.raises(ValueError, match="101 sessions begin in it; must be at most 100"):
        make(arrivals=Constant(rate_per_s=10.1)).source(seed=0, max_model_len=99)
