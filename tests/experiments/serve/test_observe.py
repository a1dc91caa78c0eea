"""`windtunnel observe` of `windtunnel serve` sees what `windtunnel simulate` says of the same traffic.

Client and server share an event loop whose clock jumps, so that neither takes time of its own: what is left
is the clock of the server, which lets tokens leave up to half a millisecond early.
"""

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from aiohttp.test_utils import TestServer

from experiments.observe.session import observe
from experiments.observe.settings import ObserveSettings
from experiments.observe.tables import records_of
from experiments.serve.http.app import make_app
from experiments.serve.settings import ServeSettings
from experiments.serve.simulated.session import build_fleet
from sim.metrics.measured import request_metrics
from tests.experiments.observe.jumping_clock import run_jumping
from tests.experiments.serve.conftest import scenario_of

WORKLOAD = ("workload=poisson", "workload.num_requests=60", "workload.arrivals.rate_per_s=15")
WORLDS = {
    "one replica": ("model=llama3_1_8b",),
    "four replicas": ("model=llama3_1_8b", "replicas=4", "routing=least_outstanding"),
    # SGLang admits by the limits of outputs, which the client sets to those that it wants.
    "SGLang": ("model=llama3_1_8b", "engine=sglang", "hardware=l40s", "workload.max_tokens=exact"),
    "speculation": ("model=llama3_1_8b", "speculation=eagle3", "acceptance=iid"),
    "disaggregated": ("model=llama3_1_8b", "pools=disaggregated"),
}


async def observed(scenario):
    """Returns what a client saw of a fleet, and the fleet."""
    fleet = build_fleet(scenario, ServeSettings(), 1.0)
    async with TestServer(make_app(fleet)) as server:
        fleet.driver.start()
        settings = ObserveSettings(url=str(server.make_url("")), workload=scenario.workload, progress=False)
        seen = await observe(settings)
        fleet.driver.stop()
    return records_of(seen.load.replies, seen.load.end_s), fleet.simulation.close().in_pandas()


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_observed_latencies_are_those_of_the_simulation(world):
    scenario = scenario_of(*WORKLOAD, *WORLDS[world])
    simulated = scenario.simulate(scenario.source()).in_pandas().requests
    seen, of_server = run_jumping(observed(scenario))
    of_server = of_server.requests.tail(len(simulated))  # before them, the client asks what the server takes
    found = seen.requests.sort_values("request_id")
    for column in ("prompt_tokens", "output_tokens"):
        assert list(found[column]) == list(simulated[column]) == list(of_server[column])
    assert set(found["status"]) == {"finished"}
    tables = [request_metrics(table, None) for table in (found, simulated, of_server)]
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        client, known, server = (table[name].to_numpy() for table in tables)
        assert np.nanmean(client) == pytest.approx(np.nanmean(known), rel=0.03), name
        assert np.nanmean(server) == pytest.approx(np.nanmean(known), rel=0.03), name
        assert np.nanquantile(client, 0.99) == pytest.approx(np.nanquantile(known, 0.99), rel=0.1), name
