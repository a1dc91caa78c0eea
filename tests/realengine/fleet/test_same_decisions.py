"""The simulator and the fleet call the same policies: the same arrivals and states, the same decisions."""

import asyncio
from math import inf, isnan

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from policies.gateway.gateway import GatewayAttachment
from sim.cluster.live import LiveSimulation
from sim.records.run import Failure, FailureKind
from sim.settings.scenario import build_scenario
from sim.workload.base import Arrival
from tests.realengine.fleet.conftest import LONG, kill_when_all_have_tokens, last
from tests.realengine.serving.async_scenarios import prompts

NUM_REQUESTS = 9
KILLED = 1
BEGUN_S = 0.3
"""Simulated time at which all requests have tokens, and none has ended."""


class Decisions(GatewayAttachment):
    """Notes the replica of each request, in the order in which the gateway sends them."""

    def __init__(self):
        self.sent = []
        self.arrived_requests = []

    def arrived(self, attempt):
        self.arrived_requests.append(attempt.arrival.request)

    def sends(self, attempt, replica, request):
        self.sent.append((request.request_id, replica.index))
        return False


class Silent:
    """A listener of the fleet that ignores all events."""

    def progressed(self, request_id, num_output_tokens):
        pass

    def ended(self, request, end):
        pass

    def lost_tokens(self, request_id):
        pass


def scenario_of(*overrides):
    source = ConfigSource(config_name="scenario", dirs=(CONFIG_DIR,))
    words = ["model=llama3_1_8b", "replicas=3", "signal_age_s=0", "caching=prefix", *overrides]
    crash = ["failures=crash", "failures.events.0.at_s=1e6"]  # so that the run expects crashes
    return build_scenario(source.compose([*words, *crash]))


def simulated(scenario, requests):
    """Returns the decisions for requests that arrive together, of which replica 1 crashes later."""
    simulation = LiveSimulation(
        pools=scenario.replica_pools(), cluster=scenario.for_a_run(), listener=Silent()
    )
    decisions = Decisions()
    simulation.gateway.attach(decisions)
    for request in requests:
        simulation.add(Arrival(request._replace(arrival_s=0.0, max_tokens=1000), 1000))
    simulation.advance(BEGUN_S, 1 << 40)
    assert not any(isnan(simulation.requests.first_token_s[request.request_id]) for request in requests)
    member = simulation.fleet.members[KILLED]
    failure = Failure(BEGUN_S, KILLED, 0, FailureKind.crash, inf)
    simulation.failure_injector.begin(member, failure)
    return decisions.sent, simulation.requests.num_resends


@pytest.mark.parametrize("recovery", ["scratch", "tokens"])
@pytest.mark.parametrize(
    "routing",
    [
        "round_robin",
        "least_outstanding",
        "least_outstanding_tokens",
        "power_of_two",
        "prefix_affinity",
    ],
)
def test_a_fleet_routes_and_resends_as_the_simulator(make_served, routing, recovery):
    scenario = scenario_of(f"routing={routing}", f"recovery={recovery}")
    cluster = scenario.for_a_run()
    gateway = {
        "routing": cluster.routing,
        "max_resends": cluster.max_resends,
        "keeps_tokens": cluster.recovery.keeps_tokens,
        "signal_age_s": cluster.signal_age_s,
        "restarts": False,
    }
    served = make_served(replicas=3, gateway=gateway, max_num_seqs=16)
    fleet, decisions = served.fleet, Decisions()
    fleet.gateway.attach(decisions)

    async def together():
        asked = [[*prompt, 5] for prompt in prompts(NUM_REQUESTS // 3)]
        asked += [[*prompt, *range(20)] for prompt in asked] + [[7] * 30] * 3
        tasks = [asyncio.create_task(last(fleet, each, LONG, output_kind="final_only")) for each in asked]
        await kill_when_all_have_tokens(fleet, KILLED, NUM_REQUESTS)
        return await asyncio.gather(*tasks)

    outputs = served.run(together())
    served.close()
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    sent, num_resends = simulated(scenario, decisions.arrived_requests)
    assert decisions.sent == sent
    assert fleet.log.num_resends == num_resends > 0
