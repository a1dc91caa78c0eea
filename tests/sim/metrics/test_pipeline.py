"""Bubbles of a pipeline: the stages' time without work, and its causes."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.iterations.layout import MicroBatch, ParallelLayout, Pass, Pipeline, Stages
from sim import simulate
from sim.metrics.definitions import Window
from sim.metrics.hardware_use import HardwareUse, add_pipeline
from tests.sim.metrics.figures_of import part_of

NAMES = (
    "decode_seqs",
    "decode_context_tokens",
    "prefill_seqs",
    "prefill_tokens",
    "prefill_pairs",
    "prefill_context_tokens",
    "sampled_seqs",
)


class FixedRoofline:
    """Replaces the roofline: every batch takes batch_s on all stages together."""

    def __init__(self, num_stages, num_layers, batch_s, last_s=0.0):
        layout = ParallelLayout(pipeline_parallel_size=num_stages)
        self.stages = Stages(layout, num_layers) if num_stages > 1 else None
        self.batch = MicroBatch(batch_s, 0.0, 0.0, last_s)

    def one_batch(self, shape):
        return self.batch


@pytest.fixture(autouse=True)
def fixed_roofline(monkeypatch):
    monkeypatch.setattr("sim.metrics.hardware_use.Roofline", FixedRoofline)


def use(model, *duration_s):
    """Computes the bubbles of iterations, one batch each, given the times from one end to the next."""
    table = pd.DataFrame(dict.fromkeys(NAMES, np.zeros(len(duration_s))))
    return pipelines([model], table.assign(duration_s=duration_s), np.zeros(len(duration_s), np.int64))[0]


def pipelines(models, iterations, pool):
    """Returns the use of the pipelines of pools, whose iterations are wholly in the window."""
    part = part_of(Window(0.0, 1.0), [SimpleNamespace(model=model) for model in models])
    use = HardwareUse(part.setting)
    for totals, model, index in zip(use.pools, models, range(len(models)), strict=True):
        own = iterations[pool == index]
        add_pipeline(totals, own, own["duration_s"].to_numpy(), model)
    return use.pipelines(SimpleNamespace(setting=part.setting))


def test_there_are_no_bubbles_without_stages():
    assert use(FixedRoofline(1, 4, 1.0), 1.0) is None


def test_a_full_pipeline_of_equal_stages_has_no_bubbles():
    found = use(FixedRoofline(4, 8, 4.0), 1.0, 1.0)
    assert found["bubble_share"] == pytest.approx(0)
    assert found["busy_share_by_stage"] == pytest.approx([1] * 4)
    assert found["mean_micro_batches"] == 4


def test_a_burst_of_batches_fills_and_empties_the_pipeline():
    """4 of them in 4 stages: 4 s, then one each second; 16 of 28 s are work."""
    found = use(FixedRoofline(4, 8, 4.0), 4.0, 1.0, 1.0, 1.0)
    assert found["busy_share"] == pytest.approx(16 / 28)
    assert found["few_micro_batches_share"] == pytest.approx(12 / 28)


def test_too_few_batches_leave_stages_empty():
    """One of four: three quarters of all stages' time."""
    found = use(FixedRoofline(4, 8, 4.0), 4.0)
    assert found["few_micro_batches_share"] == pytest.approx(3 / 4)
    assert found["unequal_stages_share"] == pytest.approx(0)
    assert found["mean_micro_batches"] == 1


def test_stages_wait_for_the_one_with_the_lm_head():
    """2 s of layers in 2 stages, 1 s of LM head: a batch every 2 s, the first stage works for 1 s of them."""
    found = use(FixedRoofline(2, 8, 3.0, last_s=1.0), 2.0, 2.0)
    assert found["busy_share_by_stage"] == pytest.approx([0.5, 1.0])
    assert found["unequal_stages_share"] == found["bubble_share"] == pytest.approx(0.25)


def test_time_of_the_host_is_no_bubble():
    found = use(FixedRoofline(4, 8, 4.0), 5.0)
    assert found["host_share"] == pytest.approx(0.2)
    assert found["bubble_share"] == pytest.approx(0.8 * 3 / 4)


@given(
    stages=st.integers(2, 8),
    layers=st.integers(8, 40),
    batch_s=st.floats(0.01, 1),
    last_share=st.floats(0, 0.5),
    sent=st.lists(st.floats(0, 5), min_size=1, max_size=5),
)
def test_shares_add_up_to_all_of_the_time(stages, layers, batch_s, last_share, sent):
    """Batches that come at any times."""
    model = FixedRoofline(stages, layers, batch_s, last_share * batch_s)
    pipeline, times = Pipeline(stages), Pass(0.1 * batch_s, *model.stages.one(model.batch), 0.0, None)
    took, end_s = [], 0.0
    for now in sorted(sent):
        start_s, end_s = max(now, end_s), pipeline.enter(times, now)
        took.append(end_s - start_s)
    found = use(model, *took)
    parts = [found[f"{name}_share"] for name in ("busy", "unequal_stages", "few_micro_batches", "host")]
    assert sum(parts) == pytest.approx(1)
    assert min(parts) >= -1e-9
    assert np.mean(found["busy_share_by_stage"]) == pytest.approx(found["busy_share"])


def test_stages_wait_while_the_last_one_drafts():
    """The shares of a pipeline of real rooflines add up, and drafting takes its part of the last stage."""
    result = simulate(
        "workload=poisson",
        "workload.num_requests=40",
        "pipeline_parallel_size=2",
        "speculation=eagle3",
    )
    found = result.summary["pipeline"]
    names = ("busy", "unequal_stages", "few_micro_batches", "drafting", "host")
    assert sum(found[f"{name}_share"] for name in names) == pytest.approx(1)
    assert found["bubble_share"] == pytest.approx(sum(found[f"{name}_share"] for name in names[1:4]))
    first, last = found["busy_share_by_stage"]
    assert first + 2 * found["drafting_share"] < last  # half of the time of drafting is idle
    assert 0.02 < found["drafting_share"] < 0.2


def test_of_several_pools_each_has_the_bubbles_of_its_own_iterations():
    """a: two stages, one batch at a time, half of it empty. b: one GPU. c: four stages, full."""
    models = [FixedRoofline(2, 4, 2.0), FixedRoofline(1, 4, 1.0), FixedRoofline(4, 8, 4.0)]
    replica, duration = np.array([0, 1, 2, 0]), np.array([2.0, 1.0, 1.0, 2.0])
    table = pd.DataFrame({"replica": replica, **dict.fromkeys(NAMES, np.zeros(4))}).assign(
        duration_s=duration
    )
    found = pipelines(models, table, replica)
    assert found[0]["bubble_share"] == found[0]["few_micro_batches_share"] == pytest.approx(0.5)
    assert found[1] is None
    assert (found[2]["stages"], found[2]["bubble_share"]) == (4, pytest.approx(0))
