"""Times of tokens rebuilt from a run's tables: every gap that was recorded, and each with its request."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.conformance.draws import draw_worlds
from experiments.conformance.speculating import SpeculatingWorld
from experiments.conformance.toys import TICK_S
from experiments.conformance.worlds import Ask
from policies.batching.chunked import Chunked
from policies.batching.splitfuse import SplitFuse
from policies.caching.paged import Paged
from policies.core.engine import EngineCore
from sim.metrics.token_times import token_times
from sim.speculation.acceptance.iid import Iid
from tests.worlds.clusters import draw_clusters, draw_crashes
from tests.worlds.speculating import draw_speculating

NAN = float("nan")


def rebuilt(records):
    return token_times(records.requests, records.iterations, records.own_gaps, records.bursts)


def assert_rebuilt(records):
    """Checks the number of rebuilt tokens, their first and last times, and their gaps."""
    requests, times = records.requests, rebuilt(records)
    assert times.num_tokens.tolist() == requests["output_tokens"].tolist()
    for row, request in enumerate(requests.itertuples()):
        if request.output_tokens:
            of_request = times.of(row)
            assert of_request[0] == request.first_token_s
            assert of_request[-1] == pytest.approx(request.last_token_s, abs=1e-9)
            assert (np.diff(of_request) > 0).all() or records.bursts is not None
    if not records.num_lost_first_tokens:  # else gaps of lost answers are recorded, too
        recorded = np.sort(np.repeat(records.gap_s, records.gap_count))
        assert np.sort(times.gaps()[0]) == pytest.approx(recorded, abs=1e-8)


@given(draw_worlds(), st.booleans())
def test_every_token_is_found_whatever_the_policies(world, leap):
    assert_rebuilt(world.simulate(leap=leap).records)


@given(st.one_of(draw_clusters(), draw_crashes()))
def test_every_token_is_found_over_replicas_kv_transfers_and_crashes(world):
    assert_rebuilt(world.simulate().records)


@given(st.data(), st.booleans())
def test_every_token_of_a_burst_is_found(data, leap):
    world = data.draw(draw_speculating(draw_worlds(), more_blocks=8))
    world = replace(world, batching=Chunked(), caching=Paged(block_size=4), engine=EngineCore)
    assert_rebuilt(world.simulate(leap=leap).records)


@given(st.data())
def test_every_token_of_a_burst_is_found_over_replicas_kv_transfers_and_crashes(data):
    worlds = st.one_of(draw_clusters(), draw_crashes())
    assert_rebuilt(data.draw(draw_speculating(worlds, more_blocks=8)).simulate().records)


def test_bursts_by_hand():
    """Answers 10 tokens with 3 drafts that are always right: at 1 tick one, then 4, 4 and 1 together."""
    records = SpeculatingWorld(asks=(Ask(0.0, 4, 10),), acceptance=Iid(rate=1.0)).simulate().records
    times = rebuilt(records)
    assert (times.time_s / TICK_S).tolist() == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert np.flatnonzero(times.begins).tolist() == [0, 1, 5, 9]
    assert (times.gaps()[0] / TICK_S).tolist() == [1, 1, 1]
    wrong = records.bursts.assign(iteration=records.bursts["iteration"] - 1)
    with pytest.raises(ValueError, match="of several runs or incomplete"):
        token_times(records.requests, records.iterations, records.own_gaps, wrong)
    with pytest.raises(ValueError, match="4 token times, the table of requests 10 output tokens"):
        token_times(records.requests, records.iterations, records.own_gaps)


@pytest.mark.parametrize("leap", [True, False])
def test_an_end_in_an_idle_step_leaves_no_gap(make_world, ask, leap):
    """Requests of 3, 1 and 1 tokens; the last two end in step 2 and are planned once more, before it ends.

    In that step they are idle: the fifth block, the last one, goes to the first request.
    """
    world = make_world(
        ask(0.0, 1, 3),
        ask(0.0, 1, 1),
        ask(0.0, 1, 1),
        batching=SplitFuse(max_num_batched_tokens=4),
        caching=Paged(block_size=1),
        num_blocks=5,
        plans_ahead=True,
    )
    records = world.simulate(leap=leap).records
    assert records.iterations["kv_blocks_used"].tolist() == [1, 4, 5, 4]
    assert np.repeat(records.gap_s, records.gap_count).tolist() == [TICK_S, TICK_S]
    assert_rebuilt(records)


def test_three_requests_by_hand():
    """0: tokens at 1, 2, 3, then preempted until 6, then 7; 1: one token; 2: none."""
    requests = pd.DataFrame(
        {
            "request_id": [10, 11, 12],
            "first_token_s": [1.0, 2.0, NAN],
            "last_token_s": [7.0, 2.0, NAN],
            "output_tokens": [5, 1, 0],
        }
    )
    iterations = pd.DataFrame(
        {"replica": 0, "start_s": np.arange(8.0), "duration_s": 1.0, "decode_seqs": [0, 1, 1, 1, 1, 1, 1, 1]}
    )
    own_gaps = pd.DataFrame(
        {"request_id": [10, 10, 99], "replica": 0, "since_s": [1.0, 3.0, 0.5], "end_s": [2.0, 6.0, 5.0]}
    )
    times = token_times(requests, iterations, own_gaps)
    assert times.time_s.tolist() == [1, 2, 3, 6, 7, 2]
    assert times.of(1).tolist() == [2.0]
    gap_s, row = times.gaps()
    assert (gap_s.tolist(), row.tolist()) == ([1, 1, 3, 1], [0, 0, 0, 0])
    with pytest.raises(ValueError, match=r"request 10: .* give 5 token times, .* 4 output"):
        token_times(requests.assign(output_tokens=[4, 1, 0]), iterations, own_gaps)


def test_several_answers_are_not_distinguished():
    requests = pd.DataFrame({"request_id": [0], "samples": [2]})
    with pytest.raises(ValueError, match=r"run with workload.branching.width=1"):
        token_times(requests, pd.DataFrame(), pd.DataFrame())
