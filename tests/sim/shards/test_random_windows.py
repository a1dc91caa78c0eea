"""Windows of random worlds, drawn from all of configs/, have the records and figures of one process."""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random, SystemRandom

import pandas as pd
import pytest

from experiments.app.settings.resolve import resolved
from sim.metrics.summary import RunFigures
from sim.records.chunk import RecordChunk, without_rows
from sim.settings.errors import ConfigError
from sim.shards.request_windows import merged_groups
from sim.shards.streamed import merged_files
from sim.workload.base import is_open_loop
from tests.sim.shards.test_shards import assert_equal
from tests.sim.shards.test_streamed_shards import new_setting_of
from tests.sim.shards.test_streamed_windows import GROUP_ROWS, part_files
from tests.worlds.fuzz.drawing import (
    STORMS,
    VARIANTS,
    accepted,
    as_list,
    build_world,
    draw_choices,
    draw_cut,
    draw_pools,
    draw_pressure,
    draw_sizes,
    draw_storm,
    families,
    is_small,
)

LEFT_OUT = (
    *("routing", "admission", "failures", "scaling", "retries", "recovery", "encoders", "turns", "roles"),
    *("metrics", "slo", "decode_routing"),
)
"""Groups by which replicas influence each other, or which have no effect on a run."""
MAX_ATTEMPTS = 40


def windowed_world(rng):
    """Draws a world that can run in windows; returns its scenario, the number of parts, and its overrides."""
    for _ in range(MAX_ATTEMPTS):
        world = {key: value for key, value in draw_choices(rng).items() if key not in LEFT_OUT}
        pools = [name for name in families()["pools"] if name != "disaggregated"]
        world["pools"] = rng.choice(pools) if rng.random() < 0.3 else "none"
        world |= {"routing": "join_shortest_kv", "routing.ties": "index", "sim.shards": "1"}
        try:
            config = resolved(VARIANTS.config(as_list(world)))
        except ConfigError:
            continue
        world |= draw_sizes(rng, config) | draw_pools(rng, config)
        world |= {
            "replicas": str(rng.randint(2, 6)),
            "signal_age_s": rng.choice(["0.001", "0.004", "0.05", "0.3", "7"]),
        }
        if rng.random() < STORMS:
            draw_storm(rng, config, world)
        scenario = scenario_of(rng, world)
        if scenario is None or not is_open_loop(scenario.source()) or not is_small(scenario):
            continue
        records = scenario.simulate(scenario.source())
        for draw, share in ((draw_pressure, 0.5), (draw_cut, 0.3)):
            changed = draw(rng, world, records)
            if rng.random() < share and (found := scenario_of(rng, changed)) is not None:
                world, scenario = changed, found
        return scenario, rng.randint(1, scenario.num_replicas), world
    return None


def scenario_of(rng, world):
    """Returns the scenario of a world in one process; None: it was refused and could not be repaired."""
    if not accepted(rng, world) or not {"routing.ties", "sim.shards", "signal_age_s"} <= set(world):
        return None
    scenario = build_world(as_list(world))
    return replace(scenario, sim=replace(scenario.sim, shards=None))


def check(seed, tally):
    """Draws the world of a seed and checks it; counts it in the tally, by what it has."""
    found = windowed_world(Random(f"windows {seed}"))
    if found is None:
        return
    whole, num_parts, world = found
    try:
        result = whole.run()
        count(tally, whole, result.records)
        assert_equal(replace(whole, sim=replace(whole.sim, shards=num_parts)).run(), result)
        check_streamed(whole, num_parts, result.records)
    except Exception as error:
        raise AssertionError(f"seed {seed}, {num_parts} parts, {as_list(world)}") from error


def count(tally, scenario, records):
    """Adds 1 to the tally for each feature that a checked world has."""
    requests = records.requests
    for name, is_so in {
        "checked": True,
        "several pools": len(scenario.pools_by_name) > 1,
        "adapters": bool(records.adapters),
        "prefix cache": requests["cached_tokens"].sum() > 0,
        "speculation": records.speculation is not None,
        "preemptions": requests["preemptions"].sum() > 0,
        "not finished": (requests["status"] != "finished").any(),
        "age of 50 ms and more": scenario.signal_age_s >= 0.05,
    }.items():
        tally[name] = tally.get(name, 0) + int(is_so)


def check_streamed(scenario, num_parts, records):
    """Asserts that the figures and requests of parts that stream are those of the records."""
    try:
        figures = RunFigures(new_setting_of(scenario)(records.pools))
    except ValueError:
        return  # it cannot stream in one process either
    figures.add(RecordChunk.of(records, ends=False))
    with tempfile.TemporaryDirectory() as folder:
        files = part_files(scenario, num_parts, Path(folder))
        found = merged_files(files, new_setting_of(scenario), scenario.sim.until_s)
        assert json.dumps(found.figures.summary(found.end)) == json.dumps(
            figures.summary(without_rows(records))
        )
        rows = [*merged_groups(found.rows, GROUP_ROWS), records.requests[:0]]
        pd.testing.assert_frame_equal(pd.concat(rows, ignore_index=True), records.requests, check_exact=True)


@pytest.mark.parametrize("seed", range(6))
def test_windows_of_a_random_world_change_nothing(seed):
    check(seed, {})


@pytest.mark.slow
def test_windows_of_new_random_worlds_change_nothing():
    is_new = os.environ.get("HYPOTHESIS_PROFILE") == "new"
    first = SystemRandom().randrange(10**9) if is_new else 100
    tally = {}
    for seed in range(first, first + 60):
        check(seed, tally)
    assert tally["checked"] > 40
    assert is_new or all(tally.values()), tally  # random worlds may have no pools
