"""Windows: parts of a fleet that run ahead by the age of the signals have the records of one process."""

import json
from functools import cache
from typing import ClassVar

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from policies.routing.join_shortest_kv import JoinShortestKv
from policies.user_code.decisions import WrongDecisionError
from sim import simulate
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario
from tests.examples import examples
from tests.sim.shards.test_shards import FEW, REFUSED
from tests.sim.shards.test_shards import WORLDS as WORLDS_OF_SHARDS

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = ("model=smollm2_135m", "hardware=l4", "routing=join_shortest_kv", "routing.ties=index")
WORLDS = {
    **WORLDS_OF_SHARDS,
    "at the times of fetches": (
        "workload=synthetic", "workload.num_requests=60", "workload/arrivals=constant",
        "workload.arrivals.rate_per_s=20", "workload.patience_s=0.5",
    ),
    "all at once": ("workload=offline_batch", "workload.num_requests=60"),
    "patience": (*FEW, "workload.patience_s=0.4"),
}  # fmt: skip


@cache
def scenario_of(*overrides):
    replicas = [] if any("pools=" in override for override in overrides) else ["replicas=5"]
    return build_scenario(composed(SOURCE, [*SMALL, *replicas, *overrides]))


@cache
def result_of(*overrides):
    return scenario_of(*overrides).run()


@examples(8, 25)
@given(st.sampled_from(sorted(WORLDS)), st.integers(1, 5), st.sampled_from([0.001, 0.05, 0.3, 7.0]))
def test_windows_change_nothing(world, parts, age_s):
    own = (*WORLDS[world], f"signal_age_s={age_s}")
    whole, divided = result_of(*own), result_of(*own, f"sim.shards={parts}")
    assert json.dumps(divided.summary) == json.dumps(whole.summary)
    for name in ("requests", "iterations", "events", "own_gaps"):
        pd.testing.assert_frame_equal(
            getattr(divided.records, name), getattr(whole.records, name), check_exact=True
        )
    pd.testing.assert_frame_equal(divided.requests, whole.requests, check_exact=True)


def test_the_least_index_is_chosen_among_equals():
    class View:
        num_unseen_tokens = 0
        num_free_kv_tokens = 100

    class Fuller(View):
        num_unseen_tokens = 1

    assert JoinShortestKv(ties="index").choose(None, [Fuller(), View(), View()], 0.0) == 1


class Secret:
    """Declares that it reads signals only, and reads a count of the router."""

    reads_signals: ClassVar[bool] = True
    reads_only_signals: ClassVar[bool] = True

    def choose(self, request, replicas, now):
        return min(range(len(replicas)), key=lambda i: replicas[i].num_outstanding)


def test_a_router_that_reads_more_than_signals_in_secret_is_an_error():
    with pytest.raises(ConfigError, match="has read num_outstanding of a replica") as caught:
        simulate("replicas=2", "sim.shards=2", "workload.num_requests=20", routing=Secret())
    assert isinstance(caught.value.__cause__, WrongDecisionError)


OTHERS = {
    "signal_age_s=0": "signal_age_s=0: parts run ahead for that time only; set signal_age_s=0.05",
    "routing.ties=outstanding": "it reads the state of replicas, which shards do not share; choose routing=",
    "pools=disaggregated": "role=prefill: KV goes from replica to replica; choose pools.prefill.role=mixed",
    "recovery=kv": "KV is copied to other replicas over one network; choose recovery=scratch",
    "sim.stop_missed=true slo=chat": "set sim.stop_missed=false",
    **{key: reason for key, reason in REFUSED.items() if not key.startswith("routing")},
}
"""What windows refuse, with the reason or what can be used instead."""


@pytest.mark.parametrize("override", OTHERS)
def test_what_cannot_run_in_windows_is_refused_in_one_sentence(override):
    with pytest.raises(ConfigError) as refused:
        scenario_of(*FEW, "sim.shards=2", *override.split())
    message = str(refused.value)
    assert "\n" not in message
    assert ". " not in message
    assert OTHERS[override] in message
    if not override.startswith("sim.shards"):
        assert message.startswith("sim.shards=2, ")
        assert message.endswith(", or set sim.shards=null")


@pytest.mark.parametrize("workload", ["closed_loop", "conversation", "agentic"])
def test_requests_that_follow_others_are_refused_in_windows(workload):
    scenario = scenario_of(f"workload={workload}", "sim.shards=2")
    with pytest.raises(ValueError, match=r"follow the ends of others; choose open-loop arrivals or a"):
        scenario.run()


class Learns(JoinShortestKv):
    """A router that learns from the ends of requests."""

    def on_end(self, request, now):
        """Does nothing, but might learn."""


def test_a_router_that_learns_from_ends_is_refused_in_windows():
    with pytest.raises(ConfigError, match=r"sim\.shards=2, routing=learns: it learns from all replicas"):
        simulate("replicas=2", "sim.shards=2", routing=Learns(ties="index"))
