"""Windows without whole tables: the merged figures and requests are those of one process."""

import json
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.engine.interrupt import Interrupt
from sim.metrics.load_series import LoadSeries
from sim.metrics.summary import RunFigures
from sim.records.chunk import RecordChunk, without_rows
from sim.shards.request_windows import merged_groups
from sim.shards.streamed import merged_files
from sim.shards.streamed_part import PartFile, StreamedPart
from sim.shards.windows import WindowGateway, part_bounds
from tests.sim.shards.test_streamed_shards import (
    WIDTH_S,
    assert_publishing_is_that_of_one_process,
    assert_same_intervals,
    new_setting_of,
    publishing,
)
from tests.sim.shards.test_windows import WORLDS, scenario_of

GROUP_ROWS = 16


def part_files(scenario, num_parts, folder):
    """Returns what each part of a run leaves; group after group of 16 requests is written."""
    pools, files = scenario.replica_pools(), []
    parts = [
        StreamedPart(
            source=scenario.source(),
            pools=pools,
            bounds=bounds,
            cluster=scenario.for_a_run(),
            sim=scenario.sim,
            new_setting=new_setting_of(scenario),
            rows=folder / f"{index}.parquet",
            width_s=WIDTH_S,
            group_rows=GROUP_ROWS,
        )
        for index, bounds in enumerate(part_bounds(num_parts, scenario.num_replicas))
    ]
    gateway = WindowGateway(
        scenario.source(),
        scenario.for_a_run().routing,
        pools,
        age_s=scenario.signal_age_s,
        until_s=scenario.sim.until_s,
    )
    rest = gateway.run(parts, Interrupt())
    for index, part in enumerate(parts):
        files.append(PartFile(part.finish(rest), folder / f"{index}.parquet"))
    return files


@settings(max_examples=25, deadline=None)
@example(world="plain", parts=1, age_s=0.001, seed=85)  # an iteration ends after the last request
@given(
    world=st.sampled_from(sorted(WORLDS)),
    parts=st.integers(1, 5),
    age_s=st.sampled_from([0.001, 0.05, 0.3, 7.0]),
    seed=st.integers(0, 100),
)
def test_figures_and_requests_are_those_of_one_process(tmp_path_factory, world, parts, age_s, seed):
    scenario = replace(scenario_of(*WORLDS[world], f"signal_age_s={age_s}"), seed=seed)
    result = scenario.run()
    records, new_setting = result.records, new_setting_of(scenario)
    whole = RunFigures(new_setting(records.pools))
    whole.add(RecordChunk.of(records, ends=False))
    files = part_files(scenario, parts, tmp_path_factory.mktemp("parts"))
    found = merged_files(files, new_setting, scenario.sim.until_s)
    assert json.dumps(found.figures.summary(found.end)) == json.dumps(whole.summary(without_rows(records)))
    pd.testing.assert_frame_equal(found.replicas, result.replicas, rtol=1e-12)
    series = LoadSeries()
    series.add(result.requests, records.iterations)
    pd.testing.assert_frame_equal(found.series.table(), series.table(), check_exact=True)
    rows = pd.concat(merged_groups(found.rows, GROUP_ROWS), ignore_index=True)
    pd.testing.assert_frame_equal(rows, records.requests, check_exact=True)
    assert_same_intervals(found, records)


@pytest.mark.parametrize("parts", [1, 3])
def test_times_to_publish_are_those_of_one_process(tmp_path, parts):
    scenario = publishing("routing=join_shortest_kv", "routing.ties=index")
    divided = replace(scenario, sim=replace(scenario.sim, shards=parts))
    files = part_files(divided, parts, tmp_path)
    found = merged_files(files, new_setting_of(divided), None)
    assert_publishing_is_that_of_one_process(scenario, found, GROUP_ROWS)


def test_requests_are_written_while_the_run_goes_on(tmp_path):
    """Each part keeps the rows of few requests."""
    scenario = scenario_of(*WORLDS["plain"])
    files = part_files(scenario, 2, tmp_path)
    found = merged_files(files, new_setting_of(scenario), None)
    assert len(found.rows) == 2
    assert all(len(list(merged_groups([rows], GROUP_ROWS))) >= 4 for rows in found.rows)
