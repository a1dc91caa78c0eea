"""Shards without tables: their merged figures and requests are those of one process."""

import json
from dataclasses import replace
from functools import partial
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.routing.load_balancing import RoundRobin
from sim.metrics.plots import OVER_TIME
from sim.metrics.result import RunSums
from sim.metrics.sketches import SKETCHED
from sim.metrics.summary import RunFigures
from sim.records.run import RecordChunk, without_rows
from sim.records.timed_rows import TimedRows
from sim.setup.streaming import check_streamed
from sim.shards.accumulators import accumulator_bytes, read_accumulator
from sim.shards.assignment import assign
from sim.shards.intervals import merged_intervals
from sim.shards.request_rows import merged_groups
from sim.shards.shard import run_shard
from sim.shards.shard_file import DamagedShardError, ShardFile
from sim.shards.sums import merged_sums, sums_bytes
from sim.shards.traffic import ShardTraffic
from sim.shards.whole_run import shard_bounds
from tests.sim.metrics.test_run_figures import compare
from tests.sim.shards.test_shards import ROUTERS, WORLDS, scenario_of
from tests.tables import assert_equal_tables, joined_frame

WIDTH_S = 16.0


def new_setting_of(scenario):
    return partial(scenario.figure_setting, scenario.pool_hardware(), kept=SKETCHED, plots=True)


def shard_files(scenario, num_shards):
    """Returns the files of all shards of a run."""
    pools, new_setting = scenario.replica_pools(), new_setting_of(scenario)
    assignment = assign(scenario.source(), scenario.for_a_run().routing, pools, scenario.sim.until_s)
    every = shard_bounds(num_shards, scenario.num_replicas, None)
    traffic = ShardTraffic(scenario.source, assignment, every)
    for index, bounds in enumerate(every):
        shard = run_shard(traffic.source(index), assignment, pools, bounds, scenario, scenario.sim)
        content = sums_bytes(shard, assignment.notes, new_setting, WIDTH_S)
        yield ShardFile(BytesIO(content))


def summary_of(figures, end):
    return json.dumps(figures.summary(end))


def assert_same_plots(found, whole):
    """Asserts that the sums of two runs that only their page shows are equal bit for bit."""
    found, whole = found.figures, whole.figures
    assert found.times.seconds() == whole.times.seconds()
    assert found.times.busy_s == whole.times.busy_s
    assert (found.drafts is None) == (whole.drafts is None)
    if whole.drafts is not None:
        drafts = found.drafts, whole.drafts
        assert_equal_tables(*(one.by_batch() for one in drafts), check_exact=True)
        for name in OVER_TIME:
            one, other = (of.by_time.of(name, 1024) for of in drafts)
            assert (one == other).all()


def assert_same_intervals(found, records):
    """Asserts that a divided run has the iterations and gaps of one process, interval after interval."""
    whole = list(TimedRows(WIDTH_S).add(RecordChunk.of(records, ends=False), is_last=True))
    assert {one.name for one in whole} == found.intervals.keys()
    for name, shards in found.intervals.items():
        expected = [one.rows for one in whole if one.name == name]
        for mine, theirs in zip(merged_intervals(name, shards), expected, strict=True):
            assert_equal_tables(mine, theirs, check_exact=True)


@settings(max_examples=12)
@given(
    world=st.sampled_from(sorted(WORLDS)),
    router=st.sampled_from(sorted(ROUTERS)),
    shards=st.integers(1, 5),
    seed=st.integers(0, 100),
)
def test_figures_and_requests_are_those_of_one_process(world, router, shards, seed):
    scenario = replace(scenario_of(*WORLDS[world]), routing=ROUTERS[router], seed=seed)
    result = scenario.run()
    records = result.records
    found = merged_sums(shard_files(scenario, shards), new_setting_of(scenario), scenario.sim.until_s)
    assert_sums_are_those_of_one_process(scenario, found, result)
    assert_same_intervals(found, records)


def assert_sums_are_those_of_one_process(scenario, found, result):
    """Asserts that a divided run has the figures and rows of one process."""
    records, end = result.records, without_rows(result.records)
    whole = RunSums(new_setting_of(scenario)(records.pools))
    whole.add(RecordChunk.of(records, ends=False))
    assert summary_of(found.sums.figures, found.end) == summary_of(whole.figures, end)
    assert_same_plots(found.sums.figures.plots(found.end), whole.figures.plots(end))
    assert_equal_tables(found.sums.replicas.table(found.end), result.replicas, check_exact=True)
    assert_equal_tables(found.sums.series.table(), whole.series.table(), check_exact=True)
    rows = joined_frame(merged_groups(found.rows, 16))
    assert_equal_tables(rows, result.requests, check_exact=True)


PUBLISHING = {
    "workload": ("workload=reasoning", "workload.of.num_requests=60", "workload.of.arrivals.rate_per_s=8"),
    "slo": ("slo.publish_ms=7000", "slo.ttft_ms=null", "slo.tpot_ms=null"),
}


def publishing(*settings):
    return scenario_of(*PUBLISHING["workload"], *PUBLISHING["slo"], *settings)


@pytest.mark.parametrize("shards", [1, 3])
def test_times_to_publish_are_those_of_one_process(shards):
    scenario = publishing()
    divided = replace(scenario, sim=replace(scenario.sim, shards=shards))
    found = merged_sums(shard_files(divided, shards), new_setting_of(divided), None)
    result = scenario.run()
    assert_sums_are_those_of_one_process(scenario, found, result)
    figures, goodput = found.sums.figures, result.summary["goodput"]
    assert list(compare(figures.summary(found.end)["goodput"], goodput)) == []
    assert 0.2 < goodput["share"] < 0.9


def test_times_to_publish_that_depend_on_other_shards_are_refused():
    message = "slo.publish_ms=7000: which tokens are hidden depends on the number of a request"
    sessions = ("workload=clients", "workload@workload.of=mooncake_like", "workload.of.duration_s=20")
    mix = ("workload=multi_tenant_day", "+workload@workload.parts.people=reasoning", "sim.until_s=60")
    drawn = (
        "workload.hidden_share._target_=sim.workload.distributions.Quantiles",
        "~workload.hidden_share.value",
        "+workload.hidden_share.probabilities=[0,1]",
        "+workload.hidden_share.values=[0.1,0.9]",
    )
    for settings_of, is_known in ((sessions, True), ((*sessions, *drawn), False), (mix, False)):
        one = scenario_of(*settings_of, "slo.publish_ms=7000")
        check_streamed(one)
        divided = replace(one, sim=replace(one.sim, shards=2), routing=RoundRobin())
        if is_known:
            check_streamed(divided)
        else:
            with pytest.raises(ValueError, match=message):
                check_streamed(divided)


def test_a_file_with_foreign_classes_is_not_read():
    scenario = scenario_of(*WORLDS["plain"])
    records = scenario.simulate(scenario.source())
    figures, copy = (RunFigures(new_setting_of(scenario)(records.pools)) for _ in range(2))
    figures.add(RecordChunk.of(records, ends=False))
    content = accumulator_bytes(figures)
    copy.merge(read_accumulator(content, RunFigures))
    assert summary_of(copy, records) == summary_of(figures, records)
    with pytest.raises(DamagedShardError):
        read_accumulator(content[:100], RunFigures)
    with pytest.raises(DamagedShardError, match=r"posix\.system is no part of an accumulator"):
        read_accumulator(b"cposix\nsystem\n(S'true'\ntR.", RunFigures)


@pytest.mark.parametrize("name", ["np.load", "np.ctypeslib.ctypes.CDLL", "isin", "Protocol"])
def test_what_a_module_of_accumulators_imports_is_not_read(name):
    module = "sim.metrics.sketches"
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    with pytest.raises(DamagedShardError):
        read_accumulator(b"\x80\x04" + texts + b"\x93\x8c\x04true\x85R.", RunFigures)


@pytest.mark.parametrize(
    "content",
    [
        b"csim.metrics.of_another_version\nFold\n.",  # no such module
        b"\x80\x05\x96" + b"\xff" * 8,  # a length that no memory has
    ],
)
def test_damage_that_is_no_error_of_pickle_is_reported_as_damage(content):
    with pytest.raises(DamagedShardError):
        read_accumulator(content, RunFigures)
