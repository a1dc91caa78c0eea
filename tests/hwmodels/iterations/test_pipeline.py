"""Pipelines: played through exactly, by closed forms, and as they are priced."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.assembly.roofline import Roofline
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations.layout import (
    InFlight,
    MicroBatch,
    ParallelLayout,
    Pass,
    Pipeline,
    Stages,
    bubble_share,
)

NO_HOST = HostOverhead(iteration_s=0, sequence_s=0, launch_s=0, graph_replay_s=0)

times = st.floats(0.01, 10)
counts = st.integers(1, 8)


# Played through


def round_seconds(stage_s, send_s=0.0):
    """Computes the seconds of a round of a full pipeline in which every round is like the last one.

    Plays rounds until they repeat: a few more than there are stages let every micro-batch wait for the
    slowest.
    """
    num_stages, count = np.asarray(stage_s).shape
    pipeline = Pipeline(num_stages)
    num_rounds = int(num_stages + count + 2)
    ends_s = [float(pipeline.play(stage_s, send_s).end_s[-1, -1]) for _ in range(2 * num_rounds)]
    return (ends_s[-1] - ends_s[num_rounds - 1]) / num_rounds


def test_a_round_by_hand():
    """Stages of 2, 3 and 1 s, sends of 0.5 s, two micro-batches. The second stage is the bottleneck."""
    played = Pipeline(3).play([[2, 2], [3, 3], [1, 1]], 0.5)
    assert played.start_s.tolist() == [[0, 2.5], [2.5, 6], [6, 9.5]]
    assert played.end_s.tolist() == [[2, 4.5], [5.5, 9], [7, 10.5]]
    assert played.sent_s.tolist() == [[2.5, 5], [6, 9.5], [7, 10.5]]


def test_the_next_round_of_a_micro_batch_waits_for_its_token():
    pipeline = Pipeline(3)
    pipeline.play([[1, 1]] * 3)
    assert pipeline.play([[1, 1]] * 3).start_s.tolist() == [[3, 4], [4, 5], [5, 6]]
    assert pipeline.play([[1, 1]] * 3, not_before_s=10).start_s[0].tolist() == [10, 11]


@given(stages=counts, micro_batches=counts, seconds=times)
def test_equal_stages_stand_still_for_stages_less_one_places(stages, micro_batches, seconds):
    """GPipe: (K - 1) / (M + K - 1), from an empty pipeline to an empty one."""
    played = Pipeline(stages).play(np.full((stages, micro_batches), seconds))
    assert bubble_share([played]) == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-9)


@given(data=st.data(), stages=counts, micro_batches=counts)
def test_no_stage_works_on_two_micro_batches_nor_before_they_are_there(data, stages, micro_batches):
    pipeline = Pipeline(stages)
    before_s = np.zeros(stages)
    for _ in range(3):
        work = data.draw(st.lists(times, min_size=stages * micro_batches, max_size=stages * micro_batches))
        played = pipeline.play(np.reshape(work, (stages, micro_batches)), 0.1)
        assert (played.start_s[:, 0] >= before_s - 1e-9).all()
        assert (played.start_s[:, 1:] >= played.sent_s[:, :-1] - 1e-9).all()
        assert (played.start_s[1:] >= played.sent_s[:-1] - 1e-9).all()
        assert played.end_s - played.start_s == pytest.approx(np.reshape(work, (stages, micro_batches)))
        before_s = played.sent_s[:, -1]


@given(st.lists(times, min_size=1, max_size=6), counts, st.floats(0, 2))
def test_a_full_pipeline_takes_one_pass_or_all_micro_batches_on_the_slowest_stage(seconds, count, send_s):
    """The closed form that iterations are priced by."""
    stage_s = np.repeat(np.array(seconds)[:, None], count, axis=1)
    busy_s = [*(s + send_s for s in seconds[:-1]), seconds[-1]]
    assert round_seconds(stage_s, send_s) == pytest.approx(max(sum(busy_s), count * max(busy_s)))


# Stages


def test_layers_left_over_go_to_stages_before_the_last():
    assert ParallelLayout(pipeline_parallel_size=4).stage_layers(32) == (8, 8, 8, 8)
    assert ParallelLayout(pipeline_parallel_size=4).stage_layers(33) == (8, 8, 9, 8)
    assert ParallelLayout(pipeline_parallel_size=4).stage_layers(35) == (9, 9, 9, 8)
    assert ParallelLayout(pipeline_parallel_size=2).stage_layers(61) == (31, 30)


def test_a_partition_says_the_layers_of_each_stage():
    layout = ParallelLayout(pipeline_parallel_size=3, pp_layer_partition=(20, 8, 4))
    assert layout.stage_layers(32) == (20, 8, 4)
    assert layout.stage_share(32) == 20 / 32
    batch = MicroBatch(32.0 + 3.0, 0.0, 0.0, 3.0)
    assert Stages(layout, 32).one(batch) == ([20.0, 8.0, 4.0 + 3.0], 0.0)


@given(stages=counts, layers=st.integers(8, 99))
def test_stages_hold_all_layers(stages, layers):
    layout = ParallelLayout(pipeline_parallel_size=stages)
    assert sum(layout.stage_layers(layers)) == layers
    assert max(layout.stage_layers(layers)) == round(layout.stage_share(layers) * layers)
    shares = Stages(layout, layers).all
    assert sum(stage.layers for stage in shares) == pytest.approx(1)
    assert [sum(s.first for s in shares), sum(s.last for s in shares)] == [1, 1]
    assert sum(stage.between for stage in shares) == pytest.approx(float(stages > 1))


def test_a_round_waits_for_the_stage_with_the_lm_head():
    """32 s of layers in 4 stages, 8 s each, 5 s of LM head: 4 micro-batches take 4 x 13 s; one 37 s."""
    stages, batch = Stages(ParallelLayout(pipeline_parallel_size=4), 32), MicroBatch(37.0, 0.0, 0.0, 5.0)
    assert stages.seconds(batch, InFlight(4, 0), batch) == 4 * 13
    assert stages.seconds(batch, InFlight(1, 0), batch) == 37
    light = MicroBatch(21.0, 0.0, 0.0, 5.0)
    assert stages.seconds(batch, InFlight(1, 3), light) == 13 + 3 * 9


def test_only_stages_that_can_be_the_slowest_are_asked():
    """32 in 4: the first, which sends and has the embedding, and the last. 33: the third, too."""
    assert len(Stages(ParallelLayout(pipeline_parallel_size=4), 32).slowest) == 2
    assert len(Stages(ParallelLayout(pipeline_parallel_size=4), 33).slowest) == 3


@pytest.mark.parametrize(
    ("decodes", "chunks", "full", "light"),
    [
        (1, [], 1, 0),
        (3, [], 3, 0),
        (40, [], 4, 0),
        (0, [(100, 0)], 1, 0),
        (0, [(2000, 0)], 1, 0),
        (40, [(300, 0)], 1, 3),
        (3, [(300, 0)], 1, 2),
        (1, [(2000, 0)], 1, 0),
        (0, [(10, 0)] * 3, 3, 0),
        (0, [(2000, 0)] * 4, 4, 0),
        (0, [(2000, 0)] * 5, 3, 0),
    ],
)
def test_micro_batches_in_flight(make_shape, decodes, chunks, full, light):
    """4 stages; chunks are whole, so a lone one is alone, and of 5 two are in the fullest micro-batch."""
    layout = ParallelLayout(pipeline_parallel_size=4)
    assert layout.in_flight(make_shape([9] * decodes, chunks)) == (full, light)


# As they are priced


def cut(models, devices, stages, model=None, **layout):
    layout = ParallelLayout(pipeline_parallel_size=stages, **layout)
    return Roofline(
        model=model or models["llama3_1_8b"], device=devices["h100_sxm"], layout=layout, host=NO_HOST
    )


def played_s(roofline, shape):
    """Plays a full pipeline of that iteration over and over; returns the seconds of a round."""
    return round_seconds(*roofline.stages.to_play(*roofline.round(shape)))


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [(1, ()), (3, ()), (64, ()), (0, (3000,)), (64, (300,)), (64, (2000,)), (2, (2000,))],
)
def test_an_iteration_is_priced_as_its_pipeline_is_played(
    models, devices, make_shape, stages, decodes, chunks
):
    """With pieces of a chunk among decodes as well: only the fullest micro-batch and the sums count."""
    roofline = cut(models, devices, stages)
    shape = make_shape([1000] * decodes, [(n, 0) for n in chunks])
    assert float(roofline.seconds(shape)) == pytest.approx(played_s(roofline, shape), rel=1e-9)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("tokens", [100, 2000, 8000])
def test_a_lone_prompt_takes_as_long_as_without_stages(models, devices, make_shape, stages, tokens):
    """It passes all of them, one after the other; sends between them take less than 1 % of it."""
    model, shape = models["llama3_1_70b"], make_shape(chunks=[(tokens, 0)])
    alone_s = Roofline(model=model, device=devices["h100_sxm"], host=NO_HOST).seconds(shape)
    assert 1 < cut(models, devices, stages, model).seconds(shape) / alone_s < 1.01


# Batches in flight


def one(*stage_s, host_s=0.0, send_s=0.0, launch_s=0.0, exposed_s=None):
    return Pass(host_s, list(stage_s), send_s, launch_s, exposed_s)


@given(stages=counts, batches=counts, seconds=times)
def test_batches_gain_what_they_overlap(stages, batches, seconds):
    """m batches on p equal stages: (m + p - 1) times, not m p."""
    pipeline = Pipeline(stages)
    ends_s = [pipeline.enter(one(*[seconds] * stages), 0.0) for _ in range(batches)]
    assert ends_s[0] == pytest.approx(stages * seconds)
    assert ends_s[-1] == pytest.approx((batches + stages - 1) * seconds)


def test_batches_follow_each_other_by_the_slowest_stage():
    """Stages of 2, 3 and 1 s, sends of 0.5 s: the first is there after 7 s, others every 3.5 s."""
    pipeline = Pipeline(3)
    ends_s = [pipeline.enter(one(2, 3, 1, send_s=0.5), 0.0) for _ in range(3)]
    assert ends_s == [7, 10.5, 14]
    assert pipeline.enter(one(2, 3, 1, send_s=0.5), 100.0) == 107


def test_the_engine_works_on_one_batch_after_the_other():
    """Two stages of 1 s, 3 s of the engine's process: a batch every 3 s; it is late by its own 3 s."""
    pipeline = Pipeline(2)
    assert [pipeline.enter(one(1, 1, host_s=3), 0.0) for _ in range(3)] == [5, 8, 11]


def test_asynchronous_scheduling_works_beside_the_devices():
    """2 s of stages beside 0.5 s of the host and 0.2 s of launches, 0.1 s exposed; then a slow host."""
    pipeline = Pipeline(2)
    assert pipeline.enter(one(1, 1, host_s=0.5, launch_s=0.2, exposed_s=0.1), 0.0) == pytest.approx(2.1)
    pipeline = Pipeline(2)
    ends_s = [pipeline.enter(one(1, 1, host_s=5, launch_s=1, exposed_s=0.1), 0.0) for _ in range(2)]
    assert ends_s == pytest.approx([6.1, 12.1])


def test_a_factor_stretches_all_of_a_batch():
    pipeline = Pipeline(3)
    assert pipeline.enter(one(2, 3, 1, send_s=0.5, host_s=1), 0.0, 2.0) == 16


@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_batch_alone_takes_as_long_as_its_iteration(
    models, devices, make_shape, stages, overlapped, graphs
):
    """A decode, a prompt, both: the host and launches included. Each stage waits for its own launches."""
    layout = ParallelLayout(pipeline_parallel_size=stages)
    roofline = Roofline(
        model=models["llama3_1_8b"],
        device=devices["h100_sxm"],
        layout=layout,
        host=HostOverhead(overlapped=overlapped, exposed_s=1e-4 if overlapped else 0.0),
        cuda_graphs=CudaGraphs(enabled=graphs),
    )
    for shape in (make_shape([1000]), make_shape(chunks=[(2000, 0)]), make_shape([1000], [(900, 0)])):
        end_s = Pipeline(stages).enter(roofline.stage_times(shape), 0.0)
        batch = roofline.one_batch(shape)
        assert sum(roofline.stages.one(batch)[0]) + batch.between_s == pytest.approx(float(batch.all_s))
        if graphs or shape.prefill_tokens == 2000:
            assert end_s == pytest.approx(float(roofline.seconds(shape)), rel=1e-3)
        assert end_s > float(batch.all_s)


def test_fewer_sequences_than_stages_take_one_pass_however_layers_divide(models, devices, make_shape):
    """4 stages of 9, 9, 9 and 5 or so layers of 33: a lone sequence never waits for the fullest stage."""
    blocks = models["llama3_1_8b"].blocks
    model = replace(models["llama3_1_8b"], blocks=(replace(blocks[0], count=33),))
    alone = Roofline(model=model, device=devices["h100_sxm"], host=NO_HOST)
    for count in (1, 2, 3):
        shape = make_shape([1000] * count)
        sends_s = cut(models, devices, 4, model).seconds(shape) - alone.seconds(make_shape([1000]))
        assert 0 < sends_s < 3 * 20e-6


def test_an_lm_head_on_the_last_stage_holds_a_full_pipeline_up(models, devices, make_shape):
    """8 x (4 layers + LM head), memory-bound: 8 x (872 + 525) M weights over (6,980 + 525) M = 1.49."""
    alone, eight = cut(models, devices, 1), cut(models, devices, 8)
    ratio = eight.seconds(make_shape([10] * 8)) / alone.seconds(make_shape([10]))
    assert ratio == pytest.approx(1.49, rel=0.1)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_operators_of_a_pipeline_sum_to_its_price(models, devices, make_shape, stages):
    """This holds whether one pass or the slowest stage sets the pace, and with pieces of a chunk, too."""
    roofline = cut(models, devices, stages)
    for shape in (make_shape([10]), make_shape([10] * 64), make_shape([1000] * 64, [(300, 0)])):
        lines = roofline.explain(shape)
        assert sum(line.seconds for line in lines) == pytest.approx(roofline.seconds(shape))
        assert next(line.seconds for line in lines if line.bound == "host") == pytest.approx(0, abs=1e-9)
