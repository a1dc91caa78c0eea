"""Clients of a run: hidden tokens, complete answers, moderation and reading in the summary of whole runs."""

import numpy as np
import pandas as pd
import pytest

from sim import simulate
from sim.metrics.client_view import SessionNumbers
from sim.workload.arrivals import Constant
from sim.workload.clients import WithClients
from sim.workload.distributions import Fixed, Lengths, Uniform
from sim.workload.synthetic import Synthetic

SMALL = {"model": "smollm2_135m", "hardware": "l4"}


def plain(num=20):
    lengths = Lengths(prompt_tokens=Fixed(value=100), output_tokens=Uniform(low=1, high=50))
    return Synthetic(arrivals=Constant(rate_per_s=4.0), lengths=lengths, num_requests=num)


def run(**settings):
    return simulate(workload=WithClients(of=plain(), **settings), slo=None, **SMALL).summary


def hidden_tokens(clients, requests):
    """Returns the hidden tokens of the requests of a whole run."""
    session, ids = (requests[name].to_numpy(np.int64) for name in ("session_id", "request_id"))
    return clients.hidden_tokens(requests, 0, SessionNumbers().of(session, ids))


def test_clients_change_what_is_seen_and_nothing_else():
    bare = simulate(workload=plain(), slo=None, **SMALL).summary
    seen = run(reading_tokens_per_s=7.0)
    assert bare["publish"] == bare["ttft"] == seen["publish"]
    assert {**seen, "clients": None, "expected_errors": None} == {
        **bare,
        "clients": None,
        "expected_errors": None,
    }
    assert seen["clients"]["reading"]["never_slower_share"] == 1.0
    assert run(reading_tokens_per_s=1e6)["clients"]["reading"]["never_slower_share"] < 0.5


def test_complete_answers_are_published_at_their_end_after_moderation():
    seen = run(streams=False, moderation_s=0.25, publish_slo_ms=1e6)
    assert seen["publish"]["mean_s"] == pytest.approx(seen["e2e"]["mean_s"] + 0.25)
    assert seen["publish"]["p99_s"] == pytest.approx(seen["e2e"]["p99_s"] + 0.25)
    assert seen["clients"]["publish_slo_share"] == 1.0


def test_hidden_tokens_are_a_share_of_the_output_and_delay_publication():
    seen = run(hidden_share=Fixed(value=0.5), publish_slo_ms=0.001)
    assert seen["clients"]["hidden_share"] == pytest.approx(0.5, abs=0.05)
    assert seen["ttft"]["mean_s"] < seen["publish"]["mean_s"] < seen["e2e"]["mean_s"]
    assert seen["clients"]["publish_slo_share"] == 0.0


def test_hidden_tokens_of_a_session_do_not_depend_on_the_order_of_other_requests():
    clients = WithClients(of=plain(), hidden_share=Uniform(low=0, high=1))
    requests = {"session_id": [-1, 4, 7, 4], "request_id": [0, 1, 2, 3], "output_tokens": [1000] * 4}
    hidden = hidden_tokens(clients, pd.DataFrame(requests))
    requests |= {"session_id": [-1, 7, 4, 4], "request_id": [0, 1, 2, 3]}
    swapped = hidden_tokens(clients, pd.DataFrame(requests))
    assert hidden[[0, 2, 1, 3]].tolist() == swapped.tolist()


def test_one_token_is_always_visible():
    clients = WithClients(of=plain(), hidden_share=Fixed(value=1.0))
    requests = pd.DataFrame({"session_id": [-1, -1, -1], "request_id": [0, 1, 2], "output_tokens": [0, 1, 9]})
    assert hidden_tokens(clients, requests).tolist() == [0, 0, 8]


def test_agents_have_figures_of_whole_tasks():
    few = ("workload.num_tasks=5", "workload.system_prompt_tokens.value=500")
    summary = simulate("workload=agentic", *few, slo=None, **SMALL).summary
    tasks = summary["tasks"]
    assert tasks["count"] == 5
    assert tasks["finished"] + summary["workload"]["num_conversations_cut"] == 5
    assert tasks["makespan_s"] >= tasks["latency"]["max_s"]
    assert np.isfinite(tasks["latency"]["mean_s"])
    assert 0 <= tasks["slo_share"] <= 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"moderation_s": -1.0}, "moderation_s=-1.0: must be finite and >= 0"),
        ({"reading_tokens_per_s": 0.0}, "reading_tokens_per_s=0.0: must be finite and > 0"),
        ({"hidden_share": Fixed(value=1.5)}, "hidden_share.value=1.5: must be a share"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        WithClients(of=plain(), **wrong)
