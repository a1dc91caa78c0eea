"""Iterations priced from a measured table: interpolation, missing operators, and refused tables."""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.devices.host import CudaGraphs, HostOverhead
from hwmodels.iterations.iteration import COMPONENTS, Explained, IterationShape, causal_pairs
from hwmodels.levels.grid import Grid, fill_holes
from hwmodels.levels.physical import check_physical, least_attention_seconds
from hwmodels.levels.profile import Profile
from hwmodels.levels.readers import Layers, llmservingsim_rows, vidur_rows
from hwmodels.levels.table import MeasuredTable

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
NO_HOST = HostOverhead(iteration_s=0, sequence_s=0, launch_s=0, graph_replay_s=0)
NO_GRAPHS = CudaGraphs(enabled=False)


class Base:
    """Prices what a table lacks: 1 us a token for attention, 2 us for messages, 3 us a sampled row."""

    peak_flops_per_s = 1e15
    peak_bytes_per_s = 4e12

    def flops(self, shape):
        return 5.0 * shape.decode_seqs

    def bytes_moved(self, shape):
        return 7.0 * shape.decode_seqs

    def explain(self, shape):
        parts = self.breakdown(shape)
        lines = {"attention_decode": "attention", "all_reduce": "communication", "lm_head": "lm_head"}
        return [
            *(Explained(n, c, parts[c], 0.0, "memory", 0.0, 0.0, 1.0) for n, c in lines.items()),
            Explained("qkv_proj", "gemm", 3.0, 0.0, "memory", 0.0, 0.0, 1.0),
            Explained("o_proj", "gemm", 1.0, 0.0, "memory", 0.0, 0.0, 1.0),
            Explained("attention_norm", "elementwise", 1.0, 0.0, "memory", 0.0, 0.0, 1.0),
            Explained("host and launches", "host", 0.0, 0.0, "host", 0.0, 0.0, 0.0),
        ]

    def breakdown(self, shape):
        tokens = shape.decode_seqs + shape.prefill_tokens
        parts = dict.fromkeys(COMPONENTS, 0.0 * tokens)
        return parts | {
            "attention": 1e-6 * tokens,
            "communication": 2e-6 * tokens,
            "lm_head": 3e-6 * shape.sampled_seqs,
        }


def rows_of(operator, component, calls, sizes, latency_us):
    """Returns one row per size; a size of attention is (prefill_tokens, cached, decode_seqs, decode_kv)."""
    columns = {"attention": ("prefill_tokens", "cached_tokens", "decode_seqs", "decode_kv_tokens")}.get(
        component, ("num_seqs",) if component == "lm_head" else ("num_tokens",)
    )
    return [
        {"operator": operator, "component": component, "calls": calls, "latency_us": latency}
        | dict(zip(columns, np.atleast_1d(size), strict=True))
        for size, latency in zip(sizes, latency_us, strict=True)
    ]


GEMM = rows_of("qkv_proj", "gemm", 2, [1, 10, 110], [10, 10, 30])
NORM = rows_of("norm", "elementwise", 4, [1, 100], [1, 2])
LM_HEAD = rows_of("lm_head", "lm_head", 1, [1, 100], [50, 149])
DECODES = [(0, 0, n, kv) for n in (1, 10) for kv in (100, 1_100)]
CHUNKS = [(n, cached, 0, 0) for n in (10, 20) for cached in (0, 1_000)]
ATTENTION = [
    *rows_of("attention", "attention", 2, DECODES, [10, 20, 30, 130]),
    *rows_of("attention", "attention", 2, CHUNKS, [8, 28, 12, 52]),
]
BOTH = [chunk[:2] + decode[2:] for chunk in CHUNKS for decode in DECODES]
APART = [row | {"chunks_apart": 1} for row in ATTENTION]
MIXED = rows_of("attention", "attention", 2, BOTH, [60 + 3 * place for place in range(16)])


def columns(*tables):
    rows = [row for table in tables for row in table]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, 0) for row in rows]) for name in names}


def make_table(*tables, host=NO_HOST, cuda_graphs=NO_GRAPHS, **given):
    profile = Profile.from_rows(columns(*tables))
    return MeasuredTable(profile=profile, base=Base(), host=host, cuda_graphs=cuda_graphs, **given)


def decode(num_seqs, context):
    return IterationShape(num_seqs, context, 0, 0, 0, 0, num_seqs)


def prefill(num_tokens, cached=0, chunks=1):
    pairs = chunks * causal_pairs(num_tokens, cached)
    total = chunks * num_tokens
    return IterationShape(0, 0, chunks, total, pairs, chunks * (num_tokens + cached), chunks)


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


shapes = st.builds(
    lambda n, kv, chunks, each, cached: IterationShape(
        n, n * kv, chunks, chunks * each, chunks * causal_pairs(each, cached), chunks * (each + cached), n + 1
    ),
    st.integers(1, 300),
    st.integers(1, 3_000),
    st.integers(0, 3),
    st.integers(1, 50),
    st.integers(0, 2_000),
)


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
    assert grid.at_many(*(np.array([size]) for size in sizes)).tolist() == [grid.at(*sizes)]


def changed(table, row, **values):
    return [*table[:row], table[row] | values, *table[row + 1 :]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            columns(changed(GEMM, 1, latency_us=0)),
            r"profile, row 1 \(qkv_proj\): latency_us=0: must be finite",
        ),
        (
            columns(changed(GEMM, 1, latency_us=-3)),
            r"row 1 \(qkv_proj\): latency_us=-3: must be finite and > 0",
        ),
        (columns(changed(GEMM, 2, num_tokens=0)), r"row 2 \(qkv_proj\): num_tokens=0: must be a number >= 1"),
        (columns(changed(GEMM, 2, num_tokens=10)), r"row 2 \(qkv_proj\): num_tokens=10 occurs twice"),
        (
            columns(changed(GEMM, 2, calls=3)),
            r"row 2 \(qkv_proj\): calls=3.0: row 0 of the same operator says 2",
        ),
        (columns(changed(GEMM, 0, calls=1.5)), r"row 0 \(qkv_proj\): calls=1.5: must be a whole number >= 1"),
        (columns(changed(GEMM, 2, component="gem")), "row 2: component=gem: must be one of gemm"),
        (
            columns(APART[:1], ATTENTION[1:]),
            "row 1 .attention.: chunks_apart=0: row 0 of the same operator says 1",
        ),
        (
            columns(APART, [row | {"chunks_apart": 1} for row in MIXED]),
            "chunks_apart=1: must have no rows",
        ),
        (
            columns(ATTENTION, [row | {"prefill_seqs": 2} for row in ATTENTION[-1:]]),
            "prefill_seqs > 1: must not occur with chunks_apart=0",
        ),
        (columns(GEMM[:1]), "qkv_proj has a single row; two sizes or more"),
        (columns(ATTENTION[:4]), "attention has no rows of a prompt chunk alone"),
        (columns(ATTENTION[4:]), "attention has no rows of decodes alone"),
        (columns(ATTENTION[:3], ATTENTION[4:]), "no row at decode_seqs=10, decode_kv_tokens=1100 and none"),
        (
            columns(ATTENTION, changed(ATTENTION, 0, operator="mla")[:1]),
            "a second operator of component attention",
        ),
        (
            columns(changed(ATTENTION, 0, decode_seqs=0)),
            r"row 0 \(attention\): decode_seqs=0: attention needs",
        ),
        (
            {name: column for name, column in columns(GEMM).items() if name != "num_tokens"},
            "profile: has no column num_tokens; it has operator, component, calls, latency_us",
        ),
        ({**columns(GEMM), "calls": np.array([2])}, "profile: columns differ in length"),
        ({name: column[:0] for name, column in columns(GEMM).items()}, "profile: holds no row"),
    ],
)
def test_profile_rejects(rows, message):
    with pytest.raises(ValueError, match=message):
        Profile.from_rows(rows)


LAYER_TABLES = {
    "dense": {
        "layer": np.array(["qkv_proj", "qkv_proj", "layernorm", "layernorm", "embedding", "embedding"]),
        "tokens": np.array([1, 100] * 3),
        "time_us": np.array([10.0, 20, 1, 2, 3, 4]),
    },
    "per_sequence": {
        "layer": np.array(["lm_head", "lm_head", "sampler", "sampler"]),
        "sequences": np.array([1, 100] * 2),
        "time_us": np.array([50.0, 60, 5, 15]),
    },
    "attention": {
        name: np.array([row[column] for row in ATTENTION])
        for name, column in {
            "prefill_chunk": "prefill_tokens",
            "kv_prefill": "cached_tokens",
            "n_decode": "decode_seqs",
            "kv_decode": "decode_kv_tokens",
            "time_us": "latency_us",
        }.items()
    },
}


def test_llmservingsim_layers_are_counted_as_a_model_runs_them():
    rows = llmservingsim_rows(**LAYER_TABLES, layers=Layers(3, 3))
    table = MeasuredTable(profile=Profile.from_rows(rows), base=Base(), host=NO_HOST, cuda_graphs=NO_GRAPHS)
    parts = table.breakdown(decode(1, 100))
    assert parts["gemm"] == pytest.approx(3 * 10e-6)
    assert parts["elementwise"] == pytest.approx((6 * 1 + 3) * 1e-6)
    assert parts["lm_head"] == pytest.approx(55e-6)
    assert parts["attention"] == pytest.approx(3 * 10e-6)


def test_llmservingsim_rejects_missing_columns_and_mixed_gpus():
    without = {name: column for name, column in LAYER_TABLES["dense"].items() if name != "tokens"}
    with pytest.raises(ValueError, match="dense: has no column tokens; it has layer, time_us"):
        llmservingsim_rows(**{**LAYER_TABLES, "dense": without}, layers=Layers(3, 3))
    two = {**LAYER_TABLES["dense"], "gpu": np.array(["A", "A", "A", "B", "B", "B"])}
    with pytest.raises(ValueError, match="dense: gpu is A, B; select the rows of one"):
        llmservingsim_rows(**{**LAYER_TABLES, "dense": two}, layers=Layers(3, 3))


def test_vidur_operators_leave_attention_to_the_base():
    linear_ops = {
        "num_tokens": np.array([1, 100]),
        "attn_pre_proj_us": np.array([10.0, 20]),
        "add_us": np.array([1.0, 2]),
        "post_attention_layernorm_us": np.array([np.nan, np.nan]),
    }
    profile = Profile.from_rows(vidur_rows(linear_ops, layers=Layers(3, 3)))
    assert {operator.name: operator.calls for operator in profile.operators} == {"qkv_proj": 3, "add": 6}
    assert MeasuredTable(profile=profile, base=Base()).missing == ("attention", "lm_head")


@pytest.fixture(scope="module")
def llama(models):
    return models["llama3_1_8b"]


def test_a_latency_below_the_physical_limit_is_refused(llama, devices):
    # gate_up_proj: 4,096 x 28,672 x 2 bytes less 50 MiB of L2 take 54.5 us at 3.35e12 bytes/s.
    fast = columns(rows_of("gate_up_proj", "gemm", 32, [1, 2], [54.0, 30.0]))
    with pytest.raises(
        ValueError, match=r"row 1 \(gate_up_proj, 2 rows\): latency_us=30: H100 SXM cannot .* 54.5 us"
    ):
        check_physical(fast, model=llama, device=devices["h100_sxm"])
    # 2 x 4,096 x 4,096 x 28,672 FLOPs at 989.4e12 a second: 972 us. Milliseconds, then.
    wrong_unit = columns(rows_of("gate_up_proj", "gemm", 32, [1, 4_096], [60.0, 1.2]))
    with pytest.raises(ValueError, match="H100 SXM cannot do it in less than 972 us; check the unit"):
        check_physical(wrong_unit, model=llama, device=devices["h100_sxm"])


def test_a_latency_of_attention_below_the_physical_limit_is_refused(llama, devices):
    # 64 x 4,096 tokens of 4,096 bytes less 50 MiB of L2 take 304.9 us at 3.35e12 bytes/s.
    shapes = [(0, 0, 64, 4_096), (4_096, 4_096, 0, 0)]
    h100 = devices["h100_sxm"]
    check_physical(
        columns(rows_of("attention", "attention", 32, shapes, [330, 700])), model=llama, device=h100
    )
    fast = columns(rows_of("attention", "attention", 32, shapes, [0.33, 700]))
    with pytest.raises(ValueError, match=r"row 0 \(attention, 64 rows\): latency_us=0.33: .* 305 us"):
        check_physical(fast, model=llama, device=h100)
    # 4 x 32 x 128 FLOPs for each of 25.2e6 pairs at 989.4e12 a second: 417 us.
    fast = columns(rows_of("attention", "attention", 32, shapes, [330, 0.7]))
    with pytest.raises(ValueError, match=r"row 1 \(attention, 4096 rows\): latency_us=0.7: .* 417 us"):
        check_physical(fast, model=llama, device=h100)
    # On two ranks each has half of the heads.
    check_physical(
        columns(rows_of("attention", "attention", 32, shapes, [150, 350])),
        model=llama,
        device=h100,
        tensor_parallel_size=2,
    )


def test_attention_within_a_window_reads_and_multiplies_no_more_than_it(llama, devices):
    """10 new tokens behind 100, window 50: 500 pairs; 60 tokens decoded at 100 each: 3,000."""
    narrow = replace(llama.blocks[0].attention, window=50)
    model = replace(llama, blocks=(replace(llama.blocks[0], attention=narrow),))
    device = replace(devices["h100_sxm"], l2_bytes=1.0)
    rows = columns(
        rows_of("attention", "attention", 32, [(10, 100, 0, 0), (0, 0, 60, 100), (50, 0, 0, 0)], [1] * 3)
    )
    least_s = least_attention_seconds(rows, model=model, device=device)
    pair_s = 4 * 32 * 128 / device.peak_flops_per_s["bf16"]
    token_s = 4_096 / device.memory_bandwidth_bytes_per_s
    expected = [max(500 * pair_s, 50 * token_s), 3_000 * token_s, max(1_275 * pair_s, 50 * token_s)]
    assert least_s == pytest.approx(expected, rel=1e-4)
    assert least_attention_seconds(rows, model=llama, device=device)[1] == pytest.approx(
        6_000 * token_s, rel=1e-4
    )


def test_nanoseconds_in_a_column_of_microseconds_are_refused(llama, devices):
    slow = columns(rows_of("gate_up_proj", "gemm", 32, [1, 2], [60_000.0, 61_000.0]))
    with pytest.raises(
        ValueError, match=r"profile, gate_up_proj: latency_us: large rows take 1,1\d\d times as long as H100"
    ):
        check_physical(slow, model=llama, device=devices["h100_sxm"])
    # Small ones are launches, however long those take.
    small = columns(rows_of("o_proj", "gemm", 32, [1, 2], [60_000.0, 61_000.0]))
    check_physical(small, model=llama, device=devices["h100_sxm"])


def test_weights_that_fit_into_the_cache_may_be_faster_than_memory(llama, devices):
    # 50.3 MB: less than the 128 MiB of an RTX PRO 6000, of which memory alone would need 31.5 us.
    rows = columns(rows_of("qkv_proj", "gemm", 32, [1, 2], [5.0, 5.0]))
    check_physical(rows, model=llama, device=devices["rtx_pro_6000_server"])
    with pytest.raises(ValueError, match="V100"):
        check_physical(rows, model=llama, device=devices["v100_sxm"])


needs_layer_tables = pytest.mark.skipif(
    not (DATA / "vllm_requests" / "layers_dense.parquet").exists(),
    reason="needs ../shared/data/vllm_requests",
)


@needs_layer_tables
@pytest.mark.parametrize(
    ("gpu", "tp", "preset"),
    [
        ("RTX4090", 1, "rtx_4090"),
        ("RTXPRO6000", 1, "rtx_pro_6000_server"),
        ("RTXPRO6000", 2, "rtx_pro_6000_server"),
    ],
)
def test_measured_layer_tables_are_read_whole(gpu, tp, preset, llama, devices):
    pd = pytest.importorskip("pandas")

    def table(name):
        rows = pd.read_parquet(DATA / "vllm_requests" / f"layers_{name}.parquet")
        rows = rows[(rows.gpu == gpu) & (rows.tp == tp)]
        return {column: rows[column].to_numpy() for column in rows}

    dense, attention = table("dense"), table("attention")
    rows = llmservingsim_rows(
        dense=dense, attention=attention, per_sequence=table("per_sequence"), layers=Layers(32, 32)
    )
    check_physical(rows, model=llama, device=devices[preset], tensor_parallel_size=tp)
    model = MeasuredTable(profile=Profile.from_rows(rows), base=Base(), host=NO_HOST, cuda_graphs=NO_GRAPHS)
    measured = (
        (attention["prefill_chunk"] == 0) & (attention["n_decode"] == 64) & (attention["kv_decode"] == 4_096)
    )
    parts = model.breakdown(decode(64, 64 * 4_096))
    assert parts["attention"] == pytest.approx(32e-6 * attention["time_us"][measured].item())
    # Weights once over the data sheet's bandwidth are a floor, twice that is far from any measurement.
    floor_s = 16.06e9 / tp / devices[preset].memory_bandwidth_bytes_per_s
    assert floor_s < model.seconds(decode(1, 128)) < 1.5 * floor_s
