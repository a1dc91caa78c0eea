"""Iterations priced from a measured table: interpolation, and operators that the table lacks."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations import COMPONENTS, IterationShape, causal_pairs
from hwmodels.levels.profile import Grid, fill_holes
from tests.hwmodels.levels.measured_rows import (
    APART,
    ATTENTION,
    GEMM,
    LM_HEAD,
    MIXED,
    NORM,
    decode,
    make_table,
    prefill,
    rows_of,
    shapes,
)


def test_an_iteration_is_the_sum_of_its_operators():
    # 10 decodes of 600 tokens: 2 x 10 us GEMM, 4 x (1 + 9/99) us norms, 59 us LM head,
    # 2 x 80 us attention, half way between 30 and 130.
    table = make_table(GEMM, NORM, LM_HEAD, ATTENTION)
    expected_us = 2 * 10 + 4 * (1 + 9 / 99) + 59 + 2 * 80
    assert table.seconds(decode(10, 6_000)) == pytest.approx(expected_us * 1e-6)


def test_the_model_s_own_seconds_are_those_without_the_operators_around_it():
    inputs = rows_of("inputs", "elementwise", 1, [1, 100], [5, 5])
    outputs = rows_of("outputs", "lm_head", 1, [1, 100], [7, 7])
    with_both, without = make_table(GEMM, NORM, LM_HEAD, inputs, outputs), make_table(GEMM, NORM, LM_HEAD)
    shape = decode(np.array([1, 10]), np.array([100, 6_000]))
    own, wanted = with_both.model_breakdown(shape), without.breakdown(shape)
    for name, seconds in with_both.breakdown(shape).items():
        assert own[name] == pytest.approx(wanted[name])
        more_s = {"elementwise": 5e-6, "lm_head": 7e-6}.get(name, 0.0)
        assert seconds - own[name] == pytest.approx(np.full(2, more_s), abs=1e-12)


def test_attention_between_points_is_linear_in_every_size():
    # Half way between 1 and 10 sequences and between 100 and 1,100 tokens: (10 + 20 + 30 + 130) / 4.
    table = make_table(ATTENTION)
    parts = table.breakdown(decode(np.array([5.5]), np.array([5.5 * 600])))
    assert parts["attention"] == pytest.approx([2 * 47.5e-6])


def test_beyond_the_grid_time_is_proportional_to_the_size():
    table = make_table(GEMM, ATTENTION)
    assert table.breakdown(prefill(220))["gemm"] == pytest.approx(2 * 60e-6)
    assert table.breakdown(decode(20, 20 * 1_100))["attention"] == pytest.approx(2 * 260e-6)


def test_below_the_grid_time_is_that_of_the_smallest_size():
    assert make_table(ATTENTION).breakdown(decode(1, 5))["attention"] == pytest.approx(2 * 10e-6)


def test_measured_points_are_met_exactly():
    table = make_table(GEMM, ATTENTION, MIXED)
    mixed = IterationShape(10, 10 * 100, 1, 20, causal_pairs(20, 0), 20, 10)
    assert table.breakdown(mixed)["attention"] == pytest.approx(2 * (60 + 3 * 10) * 1e-6)


def test_a_mixed_batch_without_measurements_of_its_own_is_the_sum_of_both():
    table = make_table(ATTENTION)
    mixed = IterationShape(10, 10 * 100, 1, 20, causal_pairs(20, 0), 20, 10)
    assert table.breakdown(mixed)["attention"] == pytest.approx(2 * (12 + 30) * 1e-6)


def test_several_chunks_count_as_the_cheaper_of_one_long_and_many_short_ones():
    attention = make_table(ATTENTION).breakdown
    # Two fresh chunks of 10: one of 20 takes 12 us, two of 10 take 16 us.
    assert attention(prefill(10, chunks=2))["attention"] == pytest.approx(2 * 12e-6)
    # Two chunks of 10 behind 1,000 cached: one of 20 behind 995 takes 51.8 us, two of 10 take 2 x 28 us.
    assert attention(prefill(10, cached=1_000, chunks=2))["attention"] == pytest.approx(2 * 51.8e-6)


def test_chunks_apart_add_up_by_the_products_that_they_need():
    attention = make_table(APART).breakdown
    # Two fresh chunks of 10: 2 x 8 us. Of 4 and 16: 4 x 4 + 16 x 16 products, as two of 10 behind 3.6 each.
    assert attention(prefill(10, chunks=2))["attention"] == pytest.approx(2 * 16e-6)
    unequal = IterationShape(0, 0, 2, 20, causal_pairs(4) + causal_pairs(16), 20, 2)
    assert attention(unequal)["attention"] == pytest.approx(2 * 2 * (8 + 20 * 3.6 / 1_000) * 1e-6)
    # Behind 1,000 cached tokens: 2 x 28 us.
    assert attention(prefill(10, cached=1_000, chunks=2))["attention"] == pytest.approx(2 * 56e-6)


def test_chunks_apart_save_what_steps_with_several_saved():
    """Alone a chunk of 10 takes 8 us a layer behind 0 tokens, 28 us behind 1,000, one of 20 52 us there."""
    several = [
        row | {"chunks_apart": 1, "prefill_seqs": count}
        for count, size, latency in (
            (2, (10, 0, 0, 0), 13),
            (3, (10, 1_000, 0, 0), 76),
            (5, (20, 1_000, 0, 0), 240),
        )
        for row in rows_of("attention", "attention", 2, [size], [latency])
    ]  # each chunk after the first takes 3, 4 and 5 us less
    one = [row | {"prefill_seqs": 1} for row in APART]
    attention = make_table(one, several).breakdown
    assert attention(prefill(10, cached=1_000))["attention"] == pytest.approx(2 * 28e-6)
    assert attention(prefill(10, cached=1_000, chunks=2))["attention"] == pytest.approx(
        2 * (2 * 28 - 4) * 1e-6
    )
    assert attention(prefill(10, chunks=3))["attention"] == pytest.approx(2 * (3 * 8 - 2 * 4) * 1e-6)
    assert attention(decode(10, 6_000)) == make_table(APART).breakdown(decode(10, 6_000))


@given(st.integers(1, 50), st.integers(0, 2_000))
def test_one_chunk_is_the_same_apart_and_together(num_tokens, cached):
    shape = prefill(num_tokens, cached)
    assert make_table(APART).seconds(shape) == pytest.approx(make_table(ATTENTION).seconds(shape))


def test_no_row_through_the_lm_head_costs_nothing():
    unfinished = prefill(10)._replace(sampled_seqs=0)
    assert make_table(LM_HEAD, ATTENTION).breakdown(unfinished)["lm_head"] == 0


def test_what_the_table_lacks_comes_from_the_base():
    table = make_table(GEMM, num_devices=2)
    assert table.missing == ("attention", "communication", "elementwise", "lm_head")
    table = make_table(GEMM, NORM, num_devices=2)
    assert table.missing == ("attention", "communication", "lm_head")
    gemm_and_norms_us = 2 * 10 + 4 * (1 + 9 / 99)
    assert table.seconds(decode(10, 6_000)) == pytest.approx((gemm_and_norms_us + 60) * 1e-6)
    assert (table.flops(decode(10, 6_000)), table.bytes_moved(decode(10, 6_000))) == (50, 70)
    assert (table.peak_flops_per_s, table.peak_bytes_per_s) == (1e15, 4e12)


def test_explain_shares_out_what_was_measured():
    host = HostOverhead(iteration_s=1e-3, sequence_s=0, launch_s=1e-4, graph_replay_s=0)
    table = make_table(GEMM, NORM, num_devices=2, host=host)
    lines = {line.operator: line for line in table.explain(decode(10, 6_000))}
    # 20 us of GEMMs in the ratio 3 to 1, 60 us from the base, and 6 kernels of 100 us to launch.
    assert lines["qkv_proj"].seconds == pytest.approx(15e-6)
    assert lines["o_proj"].seconds == pytest.approx(5e-6)
    assert lines["all_reduce"].seconds == pytest.approx(20e-6)
    assert lines["host and launches"].seconds == pytest.approx(1.6e-3 - 80e-6 - 4e-6 * (1 + 9 / 99))
    assert sum(line.seconds for line in lines.values()) == pytest.approx(table.seconds(decode(10, 6_000)))
    assert sum(line.share for line in lines.values()) == pytest.approx(1)


def test_one_device_sends_no_message():
    assert make_table(GEMM, NORM, LM_HEAD, ATTENTION).missing == ()


def test_the_host_waits_or_launches_on_top():
    host = HostOverhead(iteration_s=1e-3, sequence_s=1e-5, launch_s=1e-4, graph_replay_s=0)
    gpu_only = make_table(GEMM, NORM, LM_HEAD, ATTENTION)
    # 9 kernels of 100 us each are launched while the GPU needs less than that.
    table = make_table(GEMM, NORM, LM_HEAD, ATTENTION, host=host)
    assert table.seconds(decode(2, 200)) == pytest.approx(9e-4 + 1e-3 + 2e-5)
    replayed = make_table(GEMM, NORM, LM_HEAD, ATTENTION, host=host, cuda_graphs=CudaGraphs())
    assert replayed.seconds(decode(2, 200)) == pytest.approx(gpu_only.seconds(decode(2, 200)) + 1.02e-3)


def test_a_captured_graph_computes_the_padding_too():
    graphs = make_table(NORM, ATTENTION, cuda_graphs=CudaGraphs())
    assert graphs.breakdown(decode(9, 900))["elementwise"] == pytest.approx(4e-6 * (1 + 15 / 99))


@given(
    st.lists(shapes, min_size=1, max_size=6),
    st.sampled_from([(GEMM, NORM, LM_HEAD, ATTENTION, MIXED), (GEMM, APART), (GEMM, NORM)]),
)
def test_arrays_equal_their_elements_to_the_last_bit(batch, tables):
    table = make_table(*tables, host=HostOverhead(), cuda_graphs=CudaGraphs(max_capture_size=64))
    one_by_one = [table.seconds(shape) for shape in batch]
    together = table.seconds(
        IterationShape(*(np.array(field) for field in zip(*[shape.counts for shape in batch], strict=True)))
    )
    assert together.tolist() == one_by_one


@given(st.integers(1, 300), st.integers(1, 3_000), st.integers(1, 80), st.booleans())
def test_a_leap_of_decodes_equals_its_steps(num_seqs, kv, num_iterations, complete):
    table = make_table(*((GEMM, NORM, LM_HEAD, ATTENTION) if complete else (GEMM, NORM)), host=HostOverhead())
    steps = [table.seconds(decode(num_seqs, num_seqs * (kv + i))) for i in range(num_iterations)]
    ends_s = list(accumulate(steps, initial=0.7))[1:]
    assert table.decode_ends(0.7, num_seqs, num_seqs * kv, num_iterations) == ends_s


@given(shapes)
def test_breakdown_sums_to_seconds(shape):
    table = make_table(GEMM, NORM, LM_HEAD, ATTENTION, MIXED, host=HostOverhead(), cuda_graphs=CudaGraphs())
    parts = table.breakdown(shape)
    assert tuple(parts) == COMPONENTS
    assert sum(parts.values()) == pytest.approx(table.seconds(shape))


def test_holes_between_two_grids_are_interpolated():
    axes = [np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])]
    full = np.add.outer(2 * axes[0], 5 * axes[1])
    holes = full.copy()
    holes[1, 0] = holes[1, 2] = holes[0, 1] = holes[2, 1] = holes[1, 1] = np.nan
    assert fill_holes(axes, holes) == pytest.approx(full)


def test_a_corner_that_was_not_measured_stays_unknown():
    values = np.array([[1.0, 2.0], [3.0, np.nan]])
    assert np.isnan(fill_holes([np.array([1.0, 2.0])] * 2, values)[1, 1])


@given(st.lists(st.floats(0.5, 40), min_size=3, max_size=3))
def test_grid_gives_arrays_what_it_gives_numbers(sizes):
    axes = [np.array([1.0, 4.0, 9.0]), np.array([0.0, 2.0]), np.array([3.0, 5.0, 7.0, 30.0])]
    grid = Grid(axes, np.linspace(1, 2, 24).reshape(3, 2, 4) ** 3)
    assert grid.at(*(np.array([size]) for size in sizes)).tolist() == [grid.at(*sizes)]
