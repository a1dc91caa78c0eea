"""Attention/FFN disaggregation: the closed form against a schedule, times of the stations."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from hwmodels.iterations import IterationShape, causal_pairs
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels import Spec
from hwmodels.levels.afd import Afd, ping_pong_seconds
from sim.settings.scenario import build_scenario

DECODES = IterationShape(96, 96 * 1000, 0, 0, 0, 0, 96)
CHUNKS = IterationShape(0, 0, 6, 3000, 6 * causal_pairs(500), 3000, 6)


@pytest.fixture(scope="module")
def replica():
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    layout = ["attention_data_parallel_size=8", "expert_parallel_size=8"]
    return build_scenario(source.compose(["model=qwen3_30b_a3b", "hardware=h100_sxm", *layout])).replica


def scheduled_s(attention, ffn, message, num_layers, num_micro_batches):
    """Runs the stations one micro-batch at a time, in the order in which micro-batches arrive."""
    stations = (attention, message, ffn, message)
    ready = [0.0] * num_micro_batches
    free = [0.0] * 4  # each direction has links of its own
    for _ in range(num_layers):
        for number in range(num_micro_batches):
            for station, duration in enumerate(stations):
                begin = max(ready[number], free[station])
                ready[number] = free[station] = begin + duration
    return max(ready)


@given(
    a=st.integers(1, 9),
    f=st.integers(1, 9),
    c=st.integers(1, 9),
    num_layers=st.integers(1, 6),
    num_micro_batches=st.integers(1, 5),
)
def test_the_closed_form_is_the_length_of_the_schedule(a, f, c, num_layers, num_micro_batches):
    expected = scheduled_s(a, f, c, num_layers, num_micro_batches)
    assert ping_pong_seconds(a, f, c, num_layers, num_micro_batches) == expected


def test_the_example_of_the_docstring_and_megascales_formula():
    assert ping_pong_seconds(2, 2, 1, 2, 3) == 16
    assert ping_pong_seconds(2, 3, 1, 10, 4) == (2 + 3 + 2) + 3 * (4 * 10 - 1)


def test_more_micro_batches_hide_the_messages(replica):
    times = {
        m: Afd(base=Spec(), num_ffn_devices=4, num_micro_batches=m).iteration_model(replica) for m in (1, 3)
    }
    a, f, c, m = times[1].parts(DECODES)
    assert m == 1
    alone_s = replica.model.num_layers * (a + f + 2 * c)
    assert alone_s < times[1].seconds(DECODES) < 1.2 * alone_s  # with the LM head and the host
    assert times[3].parts(DECODES)[3] == 3


def test_each_side_has_its_operators(replica):
    """FFN devices do not see contexts; attention devices with longer ones take longer."""
    model = Afd(base=Spec(), num_ffn_devices=4).iteration_model(replica)
    near, far = model.parts(DECODES), model.parts(DECODES._replace(decode_context_tokens=96 * 8000))
    assert near[1:] == far[1:]
    assert far[0] > near[0]


def test_messages_carry_the_hidden_states_of_the_fuller_side(replica):
    """96 decodes in 3 micro-batches on 2 devices: 16 tokens each, sent to 6 of 8 experts' devices, 2,048 x 2
    bytes; each of the 6 receives 32 tokens.
    """
    model = Afd(base=Spec(), num_ffn_devices=6).iteration_model(replace_model(replica))
    link = replica.device.scale_up
    expected = link.latency_s + 6 * 16 * 2048 * 2 / (0.8 * link.bandwidth_bytes_per_s)
    assert model.parts(DECODES)[2] == pytest.approx(expected)


def replace_model(replica):
    """Returns the replica with a number of experts that six devices divide."""
    block = replica.model.blocks[0]
    model = replace(replica.model, blocks=(replace(block, mlp=replace(block.mlp, num_experts=96)),))
    return replace(replica, model=model)


@pytest.mark.parametrize("shape", [DECODES, CHUNKS])
def test_arrays_give_the_bits_of_numbers_and_parts_sum_to_the_whole(replica, shape):
    model = Afd(base=Spec(), num_ffn_devices=4).iteration_model(replica)
    contexts = shape.decode_context_tokens + shape.decode_seqs * np.arange(5)
    whole = model.seconds(shape._replace(decode_context_tokens=contexts))
    each = [model.seconds(shape._replace(decode_context_tokens=int(context))) for context in contexts]
    assert np.broadcast_to(whole, 5).tolist() == each
    assert sum(model.breakdown(shape).values()) == pytest.approx(model.seconds(shape))
    assert sum(line.seconds for line in model.explain(shape)) == pytest.approx(model.seconds(shape))


@pytest.mark.parametrize(
    ("layout", "num_ffn", "message"),
    [
        (ParallelLayout(tensor_parallel_size=4), 1, "must leave a multiple of tensor_parallel_size=4"),
        (ParallelLayout(attention_data_parallel_size=4), 4, "must leave a multiple .* of the 4 devices"),
        (ParallelLayout(pipeline_parallel_size=2), 1, "pipeline_parallel_size and context_parallel_size"),
    ],
)
def test_layouts_that_cannot_be_divided_are_refused(replica, layout, num_ffn, message):
    with pytest.raises(ValueError, match=message):
        Afd(base=Spec(), num_ffn_devices=num_ffn).iteration_model(replace(replica, layout=layout))
