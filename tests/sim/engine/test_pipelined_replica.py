"""Batches in flight on the simulated clock: hand-computed times, and worlds in which anything happens."""

from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.conformance.draws import draw_worlds
from experiments.conformance.toys import ToyModel
from hwmodels.iterations.layout import Pass
from policies.batching.chunked import Chunked
from policies.core.engine import EngineCore
from sim import simulate
from sim.engine.iteration_times import RunningStep
from sim.engine.signals import BusyTime
from tests.worlds.clusters import Cluster, cluster_of, draw_clusters, draw_crashes


class ToyStages(ToyModel):
    """Stages that each take one tick for a batch, and one more per 4 tokens unless `flat`."""

    def __init__(self, num_stages, flat=True):
        super().__init__(flat=flat)
        self.stages = self
        self.all = range(num_stages)

    def stage_times(self, shape):
        return Pass(0.0, [self.seconds(shape)] * len(self.all), 0.0, 0.0, None)


@dataclass(frozen=True, kw_only=True)
class Pipelined(Cluster):
    """A cluster in which every replica has a pipeline."""

    stages: int = 2
    flat: bool = True
    max_batch_seqs: int | None = None

    @property
    def make(self):
        return partial(EngineCore, max_batches=self.stages, max_batch_seqs=self.max_batch_seqs)

    def _pool(self, cores, *, core=None, **settings):
        given = {"plans_ahead": False, "batches_in_flight": self.stages}
        given["model"] = ToyStages(self.stages, self.flat)
        return super()._pool(cores, core=core, **settings | given)

    def _core(self, cores, **given):
        return replace(self, engine=self.make, plans_ahead=False)._made(cores, **given)

    def _made(self, cores, **given):
        return super()._core(cores, **given)


@pytest.fixture
def run(ask):
    """Returns run(stages, asks, budget, **settings): the requests of one pipeline, times in ticks."""

    def run(stages, *asks, budget=1000, **settings):
        world = Pipelined(
            asks=[ask(*one) for one in asks],
            stages=stages,
            batching=Chunked(max_num_batched_tokens=budget),
            num_blocks=1000,
            **settings,
        )
        return world.simulate().records

    return run


def ticks(seconds):
    return (np.asarray(seconds) / 0.125).tolist()


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_a_lone_prompt_passes_all_stages(run, stages):
    """One tick on each; then each token takes as long, as nothing else fills the stages."""
    (request,) = run(stages, (0.0, 100, 4)).requests.itertuples()
    assert ticks([request.first_token_s, request.finished_s]) == [stages, 4 * stages]


@pytest.mark.parametrize(("chunks", "stages"), [(1, 4), (4, 4), (4, 8), (10, 3)])
def test_chunks_of_a_prompt_overlap(run, chunks, stages):
    """m chunks on p stages: m + p - 1 ticks; a gain of m p / (m + p - 1)."""
    (request,) = run(stages, (0.0, 10 * chunks, 1), budget=10).requests.itertuples()
    assert ticks(request.first_token_s) == chunks + stages - 1


@pytest.mark.parametrize("groups", [1, 2, 4, 6])
def test_decodes_gain_no_time_by_stages_but_as_many_groups_go_round(run, groups):
    """One prompt each in 4 stages: a token every 4 ticks, for up to 4 groups at once; others join them."""
    requests = run(4, *[(0.0, 10, 12)] * groups, budget=10).requests
    gaps_s = (requests["finished_s"] - requests["first_token_s"]) / 11
    assert ticks(gaps_s) == [4] * groups


def test_a_request_that_comes_while_batches_are_in_flight_waits_for_the_oldest(run):
    """It comes at tick 1 of 4, is planned at 4 beside the first request's decode, and has a token at 8."""
    requests = run(4, (0.0, 10, 3), (0.125, 10, 1)).requests
    assert ticks(requests["first_token_s"]) == [4, 8]


def test_iterations_of_the_records_do_not_overlap(run):
    """Four chunks in four stages: the first row lasts 4 ticks, the others one each."""
    table = run(4, (0.0, 40, 2), budget=10).iterations
    assert ticks(table["start_s"]) == [0, 4, 5, 6, 7]
    assert ticks(table["duration_s"]) == [4, 1, 1, 1, 4]
    assert table["kv_tokens_used"].tolist() == [10, 20, 30, 40, 41]


def test_a_limit_of_a_batch_gains_throughput(run):
    """8 short prompts at once in 4 stages: in one batch 10 tokens take 40 ticks; two by two, 3 more."""
    asks = [(0.0, 10, 10)] * 8
    assert ticks(run(4, *asks).requests["finished_s"]) == [40] * 8
    split = run(4, *asks, max_batch_seqs=2).requests["finished_s"]
    assert ticks(split) == [40, 40, 41, 41, 42, 42, 43, 43]


@given(
    world=draw_worlds() | draw_clusters() | draw_crashes(),
    stages=st.integers(2, 4),
    flat=st.booleans(),
    limit=st.none() | st.integers(1, 3),
)
def test_whatever_happens_records_hold(world, stages, flat, limit):
    """Crashes, slow replicas, migrations, retries, aborts, transfers, any policies."""
    world = cluster_of(world) if not isinstance(world, Cluster) else world
    given_ = {f.name: getattr(world, f.name) for f in fields(world)}
    found = Pipelined(**given_ | {"stages": stages, "flat": flat, "max_batch_seqs": limit}).simulate()
    table = found.records.iterations
    for _, rows in table.groupby("replica"):
        starts_s, ends_s = rows["start_s"].to_numpy(), (rows["start_s"] + rows["duration_s"]).to_numpy()
        assert (starts_s[1:] >= ends_s[:-1] - 1e-9).all()
        assert (rows["duration_s"] > 0).all()
    requests = found.records.requests
    done = requests[requests["status"] == "finished"]
    assert (done["first_token_s"] <= done["last_token_s"]).all()


# Engines and models


NO_FRONTEND = ("engine.frontend=null", "engine.frontend_s=0")


def ttft_s(stages, prompt, *more):
    summary = simulate(
        "model=llama3_1_70b",
        "model.weights=fp8",
        "hardware=h200_sxm",
        f"pipeline_parallel_size={stages}",
        "workload=poisson",
        "workload.num_requests=1",
        "workload.arrivals.rate_per_s=0.01",
        f"workload.lengths.prompt_tokens.value={prompt}",
        "workload.lengths.output_tokens.value=2",
        "slo=none",
        *more,
    ).summary
    return summary["ttft"]["mean_s"]


def test_the_first_token_of_a_lone_prompt_comes_no_earlier_by_more_stages():
    """Llama-3.1-70B fp8, 2,000 tokens: 0.27 s on one device and on eight; sends take less than 1 %."""
    assert 1 < ttft_s(8, 2000) / ttft_s(1, 2000) < 1.01


def test_chunks_bring_it_earlier_by_what_they_overlap():
    """8,192 tokens in 4 chunks on 8 stages: (4 + 7) / 32 of one device's time; the last is the longest."""
    cut = "engine.max_num_batched_tokens=2048"
    ratio = ttft_s(8, 8192, cut, *NO_FRONTEND) / ttft_s(1, 8192, cut, *NO_FRONTEND)
    assert ratio == pytest.approx(11 / 32, rel=0.08)


def test_busy_seconds_count_batches_that_overlap_once():
    """Two batches in flight from tick 1 and 2 to 4 and 5, then a pause, then one from 8 to 11."""
    busy = BusyTime()
    steps = [RunningStep(None, None, start_s, [end_s]) for start_s, end_s in ((1, 4), (4, 5), (8, 11))]
    busy.started(steps[0], 1.0)
    busy.started(steps[1], 2.0)
    assert busy.seconds(3.0) == 2.0
    busy.ending(steps[0], 4.0)
    busy.started(steps[1], 4.0)
    busy.ending(steps[1], 5.0)
    assert busy.seconds(7.0) == 4.0
    busy.started(steps[2], 8.0)
    assert busy.seconds(9.0) == 5.0
