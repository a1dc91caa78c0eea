"""The points that are measured, and the random steps by which the prices are checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.calibrate.engine.grids import (
    VERIFYING,
    decode_points,
    prefill_points,
    spread_around,
    verifying_points,
)
from experiments.calibrate.engine.measure import Sections
from experiments.calibrate.engine.profile_rows import profile_rows
from experiments.calibrate.engine.residuals import errors_by_kind, random_steps, residual_table
from experiments.calibrate.engine.settings import MeasureSettings
from experiments.calibrate.engine.steps import Chunk, Step, Tables
from hwmodels.iterations import IterationShape
from hwmodels.levels.profile import Profile
from tests.experiments.calibrate.engine.tiny import spec

torch.set_num_threads(1)


def test_grids_are_full_and_reach_their_limits():
    decodes, chunks = decode_points(5, 100), prefill_points(40, 100)
    assert {point.decode_seqs for point in decodes} == {1, 2, 3, 4, 5}
    assert {point.decode_kv_tokens for point in decodes} == {16, 64, 100}
    assert len(decodes) == 15
    assert max(point.prefill_tokens for point in chunks) == 38
    assert len(chunks) == len({point[1:] for point in chunks})


def test_steps_of_several_chunks_have_sizes_that_are_measured_alone():
    points = verifying_points(32, 1024, 1024)
    alone = {(point.prefill_tokens, point.cached_tokens) for point in prefill_points(1024, 1024)}
    assert len(points) == len(VERIFYING)
    for point in points:
        assert len(point.step.chunks) == point.prefill_seqs > 1
        assert (point.prefill_tokens, point.cached_tokens) in alone
    assert verifying_points(32, 40, 100) == []
    assert {point.prefill_seqs for point in verifying_points(4, 40, 512)} == {2, 4}


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("mean", [10, 1000, 1900])
def test_spread_contexts_keep_their_mean_and_the_limit(count, mean):
    contexts = spread_around(mean, count, 2000)
    assert np.mean(contexts) == pytest.approx(mean, abs=1)
    assert 1 <= min(contexts) <= max(contexts) <= 2000


def test_every_small_batch_is_measured_with_one_context_and_the_grid_is_whole():
    points = decode_points(40, 100) + prefill_points(40, 100)
    assert {point.decode_seqs for point in points} == {0, *range(1, 33), 40}
    times = dict.fromkeys(["qkv", "lm_head", "decode_attention"], 1e-3)
    rows = profile_rows([Sections(point, times) for point in points], num_layers=2)
    profile = Profile.from_rows({name: rows[name].to_numpy() for name in rows})
    leap = IterationShape(29, np.array([29 * 90.0]), 0, 0, 0, 0, 29)
    assert profile.attention.seconds(leap) == pytest.approx([1e-3])


def test_random_steps_stay_within_the_limits():
    limits = {"max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 100}
    steps = random_steps(200, **limits, seed=3)
    assert max(len(step.contexts) + len(step.chunks) for step in steps) <= 8
    assert max(step.num_tokens for step in steps) <= 100
    assert max(chunk.cached + chunk.new for step in steps for chunk in step.chunks) <= 128
    assert {step.kind for step in steps} == {"decode", "prefill", "mixed"}


def test_errors_are_of_the_price_against_the_measurement():
    steps = [Step(contexts=(4,)), Step(contexts=(4,)), Step(chunks=(Chunk(0, 4),))]
    errors = errors_by_kind(residual_table(steps, [1.0, 1.0, 2.0], [1.1, 0.8, 3.0])).set_index("kind")
    assert errors.loc["decode", "median"] == pytest.approx(0.15)
    assert errors.loc["decode", "total"] == pytest.approx(-0.05)
    assert errors.loc["prefill", "bias"] == pytest.approx(0.5)
    assert errors.loc["all", "iterations"] == 3


def test_block_tables_of_different_slots_share_nothing_while_blocks_last():
    tables = Tables.drawn(3, 12, 4, seed=0).ids_SM
    assert sorted(tables.ravel().tolist()) == list(range(1, 13))
    assert Tables.drawn(3, 5, 4, seed=0).ids_SM.max() == 5


def test_limits_never_exceed_the_models_context():
    settings = MeasureSettings(device="cpu", model=spec())
    assert settings.limit("max_model_len") == 256
    assert settings.limit("max_num_seqs") == 32
