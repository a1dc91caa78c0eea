"""A live simulation: the same tables as a run that knows its traffic, and every token once at its time."""

from itertools import islice
from math import inf
from random import Random

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.cluster.live import LiveSimulation
from sim.records.requests import EMPTY_ROW, RequestLog, Status
from sim.report.files import write_table
from sim.settings.scenario import build_scenario
from sim.workload.base import WorkloadNotes
from sim.workload.listed import ListedSource
from sim.workload.recording import FILE, Recording
from tests.tables import assert_equal_tables

MANY = 1 << 40

WORLDS = {
    "one": ["model=llama3_1_8b", "load=4"],
    "four replicas": ["model=llama3_1_8b", "replicas=4", "load=8", "routing=prefix_affinity"],
    "small chunks": ["model=llama3_1_8b", "caching=prefix", "batching.max_num_batched_tokens=512"],
    "little memory": ["model=llama3_1_8b", "hardware=l4", "load=3"],
    "crash": [
        "model=llama3_1_8b",
        "replicas=2",
        "load=6",
        "failures=crash",
        "failures.events.0.at_s=5",
        "recovery=tokens",
    ],
    "crash, from scratch": [
        "model=llama3_1_8b",
        "replicas=2",
        "load=6",
        "failures=crash",
        "failures.events.0.at_s=5",
    ],
    "disaggregated": ["model=llama3_1_8b", "pools=disaggregated", "load=2"],
    "speculation": ["model=llama3_1_8b", "speculation=eagle3", "acceptance=iid", "load=2"],
}


class Heard:
    """Keeps what the listener of a live simulation hears, with its time."""

    def __init__(self):
        self.simulation = None
        self.tokens = {}
        self.ends = {}
        self.lost = []

    def progressed(self, request_id, num_output_tokens):
        self.tokens.setdefault(request_id, []).append((self.simulation.now, num_output_tokens))

    def lost_tokens(self, request_id):
        self.lost.append(request_id)

    def ended(self, request, end):
        assert request.request_id not in self.ends
        self.ends[request.request_id] = end


def live(scenario):
    heard = Heard()
    simulation = LiveSimulation(pools=scenario.replica_pools(), cluster=scenario.for_a_run(), listener=heard)
    heard.simulation = simulation
    return simulation, heard


def compose(*overrides):
    source = ConfigSource(config_name="scenario", dirs=(CONFIG_DIR,))
    return build_scenario(source.compose(list(overrides)))


@pytest.mark.sampled(fast=3, slow=5)
@pytest.mark.parametrize("overrides", WORLDS.values(), ids=WORLDS)
def test_tables_are_those_of_a_run_that_knows_its_traffic(overrides):
    scenario = compose(*overrides, "sim.leap=false")
    arrivals = list(islice(scenario.source().arrivals(), 80))
    known = scenario.simulate(ListedSource(arrivals, notes=WorkloadNotes())).in_pandas()
    simulation, heard = live(scenario)
    for arrival in arrivals:
        simulation.advance(arrival.at_s, MANY)
        simulation.add(arrival)
    while simulation.next_event_s < inf:
        simulation.advance(simulation.next_event_s, MANY)
    found = simulation.close().in_pandas()
    assert_equal_tables(found.requests, known.requests)
    columns = list(known.iterations)
    assert_equal_tables(
        found.iterations[columns].sort_values(["replica", "start_s"], ignore_index=True),
        known.iterations.sort_values(["replica", "start_s"], ignore_index=True),
    )
    for row in known.requests.itertuples():
        end, tokens = heard.ends[row.request_id], heard.tokens[row.request_id]
        assert end == (Status[row.status], row.reason, row.output_tokens)
        if not row.lost_tokens:  # else the client has tokens that the log has forgotten
            assert tokens[0][0] == row.first_token_s
        assert tokens[-1] == (row.last_token_s, row.output_tokens)
        counts = [count for _, count in tokens]
        assert counts == sorted(set(counts))


@pytest.mark.parametrize("recovery", ["scratch", "tokens"])
def test_requests_that_begin_again_after_a_crash_are_reported_if_their_tokens_are_not_kept(recovery):
    scenario = compose(*WORLDS["crash, from scratch"], f"recovery={recovery}")
    simulation, heard = live(scenario)
    for arrival in islice(scenario.source().arrivals(), 40):
        simulation.add(arrival)
    crash_s = scenario.failures.events[0].at_s
    simulation.advance(crash_s - 1e-9, MANY)
    begun = {request_id for request_id in heard.tokens if request_id not in heard.ends}
    simulation.advance(crash_s, MANY)
    assert begun
    assert set(heard.lost) <= begun
    assert bool(heard.lost) == (recovery == "scratch")


def test_a_fleet_that_starts_cold_serves_after_the_cold_start():
    scenario = compose("model=llama3_1_8b", "cold_start=in_memory", "cold_start.provision_s=3", "replicas=2")
    simulation, heard = live(scenario)
    simulation.start_cold()
    cold_start_s = scenario.cold_start_s
    simulation.add(next(iter(scenario.source().arrivals())))
    simulation.advance(cold_start_s * 0.999, MANY)
    assert not simulation.fleet.serving
    simulation.advance(cold_start_s + 100, MANY)
    assert len(simulation.fleet.serving) == 2
    assert heard.tokens[0][0][0] > cold_start_s
    assert [replica.ready_s for replica in simulation.close().replicas] == [cold_start_s] * 2


@pytest.mark.parametrize("overrides", WORLDS.values(), ids=WORLDS)
def test_a_run_of_its_recording_has_the_tables_of_a_session_with_late_news_and_clients_that_leave(
    overrides, tmp_path
):
    scenario, random = compose(*overrides), Random(1)
    simulation, heard = live(scenario)
    for arrival in islice(scenario.source().arrivals(), 80):
        simulation.advance(arrival.at_s + random.choice([-0.01, 0.0, 0.004, 0.02]), MANY)
        simulation.add(arrival)
        in_progress = sorted(set(range(arrival.request.request_id + 1)) - set(heard.ends))
        if random.random() < 0.3:
            leaving = random.choice(in_progress[-3:])
            simulation.abort(leaving, arrival.at_s + random.choice([-1.0, 0.0, 0.3]))
    while simulation.next_event_s < inf:
        simulation.advance(simulation.next_event_s, MANY)
    found = simulation.close().in_pandas()
    write_table(simulation.traffic.table({}), tmp_path / FILE)
    source = Recording(path=tmp_path).source(seed=0, max_model_len=1 << 20)
    known = scenario.simulate(source).in_pandas()
    assert {"finished", "aborted"} <= set(found.requests["status"])
    assert_equal_tables(found.requests, known.requests, rtol=0, atol=0)
    order = ["replica", "start_s"]
    columns = list(known.iterations)
    assert_equal_tables(
        found.iterations[columns].sort_values(order, ignore_index=True),
        known.iterations.sort_values(order, ignore_index=True),
        rtol=0,
        atol=1e-9,
    )


def served(scenario, num_requests, until_s, then=lambda simulation: None):
    """Runs requests; calls `then` at until_s. Returns the records, and what was heard."""
    simulation, heard = live(scenario)
    for arrival in islice(scenario.source().arrivals(), num_requests):
        simulation.add(arrival)
    simulation.advance(until_s, MANY)
    then(simulation)
    return simulation, heard


@pytest.mark.parametrize("overrides", WORLDS.values(), ids=WORLDS)
def test_records_that_end_early_are_those_of_a_run_that_ends_then(overrides):
    scenario = compose(*overrides)
    _, whole = served(scenario, 60, inf)
    times_s = sorted(time_s for tokens in whole.tokens.values() for time_s, _ in tokens)
    early, _ = served(scenario, 60, times_s[len(times_s) // 2])
    expected = early.close().in_pandas()
    cut, heard = served(scenario, 60, expected.end_s, LiveSimulation.end_records)
    cut.advance(times_s[len(times_s) * 3 // 4], MANY)
    num_bytes = cut.num_record_bytes
    cut.discard_records()
    assert cut.num_record_bytes < num_bytes
    cut.advance(inf, MANY)
    assert (heard.tokens, heard.ends) == (whole.tokens, whole.ends)
    found = cut.close().in_pandas()
    assert found.end_s == expected.end_s
    for name in ("requests", "iterations", "events", "own_gaps"):
        assert_equal_tables(getattr(found, name), getattr(expected, name))
    assert found.replicas == expected.replicas
    assert found.num_crash_tokens == expected.num_crash_tokens
    assert (expected.requests["status"] == "unfinished").any()


def test_a_row_of_the_log_is_empty_after_it_is_cleared():
    scenario = compose(*WORLDS["little memory"])
    simulation, _ = served(scenario, 10, inf)
    log = simulation.requests
    log.clear(3)
    empty = RequestLog()
    empty.arrive(next(iter(scenario.source().arrivals()))._replace().request)  # makes rows
    assert all(repr(getattr(log, name)[3]) == repr(getattr(empty, name)[3]) for name in EMPTY_ROW)
