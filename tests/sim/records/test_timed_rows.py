"""Intervals of iterations and gaps do not depend on the moments at which a run was cut."""

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.cluster import simulation
from sim.records.run import RecordChunk
from sim.records.timed_rows import TimedRows, interval_s
from sim.settings.scenario import build_run
from sim.setup.streaming import stream
from tests.tables import assert_equal_tables

SOURCE = ConfigSource(config_name="scenario", dirs=(CONFIG_DIR,))
WIDTH_S = 1.0
POISSON = ("workload=poisson", "workload.num_requests=120")
WORLDS = {
    "plain": (*POISSON, "replicas=2"),
    "a replica that is idle for long": (*POISSON, "replicas=2", "workload.arrivals.rate_per_s=0.5"),
    "long decodes": (*POISSON, "replicas=3", "workload.lengths.output_tokens.value=3000"),
    "speculation": (*POISSON, "speculation=eagle3", "model=llama3_1_8b"),
    "disaggregated": (*POISSON, "pools=disaggregated"),
    "crashes": (*POISSON, "replicas=2", "failures=crash", "failures.events.0.at_s=5"),
    "adapters": ("workload=lora", "workload.of.num_requests=120", "adapters=fixed_slots"),
    "little memory": (*POISSON, "engine.num_kv_blocks=400", "workload.arrivals.rate_per_s=30"),
    "conversations": ("workload=conversation", "workload.num_conversations=30", "caching=radix"),
}


class Intervals:
    """Keeps the intervals of a run that streams, and how many came before its last chunk."""

    def __init__(self):
        self.found, self.num_early = [], 0
        self._timed = TimedRows(WIDTH_S)

    def add(self, chunk):
        self.num_early = len(self.found)
        self.found += self._timed.add(chunk, is_last=chunk.end is not None)

    def finish(self, end, sums):
        pass


@pytest.mark.sampled(fast=3, slow=6)
@pytest.mark.parametrize("world", WORLDS)
def test_intervals_are_those_of_the_whole_run(world, monkeypatch):
    monkeypatch.setattr(simulation, "EVENTS_BETWEEN_REPORTS", 64)
    scenario, source = build_run(SOURCE.compose(list(WORLDS[world])))
    records = scenario.run(source).records
    tables = Intervals()
    stream(scenario, scenario.source(), tables, group_rows=16)
    expected = list(TimedRows(WIDTH_S).add(RecordChunk.of(records, ends=False), is_last=True))
    assert tables.num_early > 0.4 * len(expected)
    found = {(one.name, one.number): one.rows for one in tables.found}
    assert len(found) == len(tables.found)
    assert found.keys() == {(one.name, one.number) for one in expected}
    for one in expected:
        assert_equal_tables(found[one.name, one.number], one.rows, check_exact=True)
    num_rows = sum(len(one.rows) for one in expected if one.name == "iterations")
    assert num_rows == len(records.iterations)


@pytest.mark.parametrize(
    ("num_replicas", "seconds"), [(1, 4096), (3, 1024), (1000, 4), (10**5, 1 / 16), (10**6, 1 / 16)]
)
def test_intervals_are_shorter_in_larger_fleets(num_replicas, seconds):
    assert interval_s(num_replicas) == seconds
