"""A streamed run hands on the records of a plain run, bit for bit, whenever it is cut."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.conformance import worlds
from experiments.conformance.adapting import draw_adapter_worlds
from experiments.conformance.draws import draw_worlds
from sim.cluster import simulation
from sim.cluster.chunked import ChunkedRecording
from sim.cluster.simulation import Simulation
from sim.records.mapped_requests import MappedRequestLog
from sim.records.requests import EMPTY_ROW
from sim.records.run import without_rows
from sim.records.table import to_pandas
from tests.examples import examples
from tests.tables import assert_equal_tables, joined_frame
from tests.worlds import services
from tests.worlds.branching import draw_branching_worlds
from tests.worlds.clusters import draw_clusters, draw_crashes
from tests.worlds.services import draw_failing_services, draw_services
from tests.worlds.speculating import draw_speculating

FIELDS = (
    *("pools", "replicas", "end_s", "interrupted", "num_evicted_blocks", "num_discarded_tokens"),
    *("pinned_token_s", "num_lost_first_tokens", "num_crash_tokens", "failures", "num_resends"),
    *("failed_attempts", "recovery", "links"),
)
"""Fields of the records that are no tables."""


class SpoiltLog(MappedRequestLog):
    """A log whose dropped rows have senseless values, so that it shows if they are read again."""

    def _drop(self, first, end):
        super()._drop(first, end)
        for name in EMPTY_ROW:
            column = getattr(self, name)
            for request_id in range(first, min(end, self._num_open)):
                column[request_id] = 1 if name == "has_arrived" else 77


class OftenCut(ChunkedRecording):
    """The recording of a streamed run that is cut after any number of events."""

    def __init__(self, take, group_rows):
        super().__init__(take, group_rows)
        self.requests = SpoiltLog(group_rows)

    def _is_due(self, run):
        return True


def streamed(world, leap, every, group_rows):
    """Returns the run of a world that is cut after every `every` events, and its chunks."""
    chunks = []

    def simulation_of(**settings):
        return Simulation(recording=OftenCut(chunks.append, group_rows), **settings)

    with (
        patch.object(worlds, "Simulation", simulation_of),
        patch.object(services, "Simulation", simulation_of),
        patch.object(simulation, "EVENTS_BETWEEN_REPORTS", every),
    ):
        return world.simulate(leap), chunks


def gaps_of(records):
    return np.stack([records.gap_s, records.gap_count, records.gap_end_s], axis=1)


def assert_same(world, leap, every, group_rows):
    plain = world.simulate(leap).records
    run, chunks = streamed(world, leap, every, group_rows)
    assert [chunk.end is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    requests = joined_frame([chunk.requests for chunk in chunks])
    assert_equal_tables(requests, plain.requests, check_exact=True, check_dtype=not plain.requests.empty)
    for chunk in chunks[:-1]:
        assert len(np.unique(chunk.requests["request_id"] // group_rows)) * group_rows == len(chunk.requests)
    for name, keys in (
        ("iterations", ["replica", "iteration"]),
        ("events", ["replica"]),
        ("own_gaps", ["replica"]),
        ("bursts", ["replica"]),
    ):
        parts = [getattr(chunk, name) for chunk in chunks if getattr(chunk, name) is not None]
        if getattr(plain, name) is None:
            assert not parts
            continue
        joined = joined_frame(parts).sort_values(keys, kind="stable", ignore_index=True)
        assert_equal_tables(joined, getattr(plain, name), check_exact=True)
        if name == "iterations":
            for part in map(to_pandas, parts):
                assert part[keys].equals(part[keys].sort_values(keys))
    gaps = np.concatenate([gaps_of(chunk) for chunk in chunks])
    assert sorted(gaps.tolist()) == sorted(gaps_of(plain).tolist())
    if plain.unfilled is not None:
        unfilled = np.concatenate([chunk.unfilled for chunk in chunks if chunk.unfilled is not None])
        assert sorted(unfilled.tolist()) == sorted(plain.unfilled.tolist())
    rest, expected = run.records, without_rows(plain)
    if expected.speculation is not None:
        assert_equal_tables(rest.speculation.acceptance, expected.speculation.acceptance)
    counts = [
        [[getattr(each, name) for name in each.__slots__] for each in records.adapters]
        for records in (rest, expected)
    ]
    assert counts[0] == counts[1]
    for name in FIELDS:
        assert getattr(rest, name) == getattr(expected, name), name


CUTS = {"leap": st.booleans(), "every": st.integers(1, 12), "group_rows": st.integers(1, 4)}


@given(world=draw_worlds(), **CUTS)
@examples(6, 100)
def test_rows_are_those_of_a_plain_run(world, leap, every, group_rows):
    assert_same(world, leap, every, group_rows)


@pytest.mark.slow
@given(world=draw_clusters() | draw_crashes(), **CUTS)
@examples(6, 100)
def test_rows_of_retries_and_crashes_are_those_of_a_plain_run(world, leap, every, group_rows):
    assert_same(world, leap, every, group_rows)


@given(world=draw_services() | draw_failing_services(), **CUTS)
@examples(6, 100)
def test_rows_of_disaggregated_pools_are_those_of_a_plain_run(world, leap, every, group_rows):
    assert_same(world, leap, every, group_rows)


@given(world=draw_branching_worlds() | draw_speculating(draw_worlds()) | draw_adapter_worlds(), **CUTS)
@examples(6, 100)
def test_rows_of_branches_drafts_and_adapters_are_those_of_a_plain_run(world, leap, every, group_rows):
    assert_same(world, leap, every, group_rows)
