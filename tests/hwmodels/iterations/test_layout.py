"""Parallel layouts: which are refused, and how much of an iteration one device gets."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.iterations import IterationShape
from hwmodels.iterations.layout import ParallelLayout

alike = st.tuples(
    st.integers(0, 40), st.integers(1, 9000), st.integers(0, 8), st.integers(1, 500), st.integers(0, 900)
).filter(lambda counts: counts[0] + counts[2] > 0)
"""(decodes, context of each, chunks, new tokens of each, cached tokens of each)."""

sizes = st.sampled_from([1, 2, 3, 4, 8])
layouts = st.builds(
    ParallelLayout,
    tensor_parallel_size=sizes,
    pipeline_parallel_size=sizes,
    context_parallel_size=sizes,
    attention_data_parallel_size=sizes,
    num_micro_batches=st.none() | st.integers(1, 6),
)


def shape_of(make_shape, counts):
    decodes, context, chunks, new, cached = counts
    return make_shape([context] * decodes, [(new, cached)] * chunks)


def test_devices_are_counted():
    layout = ParallelLayout(
        tensor_parallel_size=2,
        context_parallel_size=3,
        attention_data_parallel_size=4,
        pipeline_parallel_size=5,
        expert_parallel_size=8,
    )
    assert (layout.num_token_groups, layout.stage_size, layout.num_devices) == (12, 24, 120)
    assert layout.expert_tensor_parallel_size == 3
    assert (layout.micro_batches, layout.num_batch_shares) == (5, 20)
    assert replace(layout, num_micro_batches=2).num_batch_shares == 8


@pytest.mark.parametrize(
    ("ranks", "stride", "nodes"),
    [(1, 1, 1), (8, 1, 1), (9, 1, 3), (16, 1, 2), (2, 8, 2), (4, 4, 2), (4, 8, 4), (3, 4, 3), (2, 16, 2)],
)
def test_a_group_lies_in_as_many_nodes_as_hold_it_evenly(toy_device, ranks, stride, nodes):
    assert ParallelLayout().nodes_spanned(ranks, toy_device, stride) == nodes


# What is refused


@pytest.mark.parametrize(
    "name",
    [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "context_parallel_size",
        "attention_data_parallel_size",
        "expert_parallel_size",
        "num_micro_batches",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_rejects_sizes_that_are_not_whole(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value}: must be (a whole number )?>= 1"):
        ParallelLayout(**{name: value})


@pytest.mark.parametrize(
    ("stages", "partition", "message"),
    [
        (4, (8, 8, 16), r"pp_layer_partition=\[8,8,16\]: must have one number for each of the pipeline_para"),
        (2, (8, 8, 16), r"must have one number .*=2 stages, at least two; set pipeline_parallel_size=3"),
        (1, (32,), r"pp_layer_partition=\[32\]: must have one number .* set pipeline_parallel_size=2"),
        (2, (), r"pp_layer_partition=\[\]: must have one number"),
        (2, (32, 0), r"pp_layer_partition=\[32,0\]: 0 must be a whole number of layers >= 1"),
        (2, (33, -1), r"pp_layer_partition=\[33,-1\]: -1 must be a whole number of layers >= 1"),
        (2, (15.5, 16.5), r"15.5 must be a whole number"),
        (2, (16, 17), r"pp_layer_partition=\[16,17\]: the sum is 33; must be 32, the layers of llama-3.1-8b"),
        (2, (8, 8), r"the sum is 16; must be 32"),
    ],
)
def test_rejects_partitions_that_do_not_fit(models, devices, stages, partition, message):
    with pytest.raises(ValueError, match=message):
        ParallelLayout(pipeline_parallel_size=stages, pp_layer_partition=partition).check(
            models["llama3_1_8b"], devices["h100_sxm"]
        )


def test_rejects_expert_parallelism_that_does_not_divide_a_stage():
    with pytest.raises(ValueError, match=r"expert_parallel_size=3: must divide the 8 devices of a stage"):
        ParallelLayout(tensor_parallel_size=4, attention_data_parallel_size=2, expert_parallel_size=3)


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ("llama3_1_8b", {"tensor_parallel_size": 3}, "tensor_parallel_size=3: must divide .* nearest: 2"),
        (
            "llama3_1_8b",
            {"pipeline_parallel_size": 33},
            "pipeline_parallel_size=33: must be <= 32, the layers of llama-3.1-8b",
        ),
        (
            "llama3_1_8b",
            {"tensor_parallel_size": 4, "expert_parallel_size": 4},
            "expert_parallel_size=4: llama-3.1-8b has no experts; must be 1",
        ),
        (
            "mixtral_8x7b",
            {"attention_data_parallel_size": 6, "expert_parallel_size": 6},
            "expert_parallel_size=6: must divide the 8 experts of mixtral-8x7b; nearest: 4",
        ),
    ],
    ids=["heads", "layers", "no experts", "experts"],
)
def test_rejects_what_the_model_does_not_allow(models, devices, model, layout, message):
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**layout).check(models[model], devices["h100_sxm"])


@pytest.mark.parametrize("name", ["context", "attention_data", "pipeline"])
def test_rejects_a_second_node_where_no_link_leads_there(models, toy_device, name):
    layout = ParallelLayout(**{f"{name}_parallel_size": 9})
    layout.check(models["llama3_1_8b"], toy_device)
    with pytest.raises(ValueError, match=r"9 devices per replica: must be <= 8, one node, as toy has"):
        layout.check(models["llama3_1_8b"], replace(toy_device, inter_node=None))


# The share of one device


@given(counts=alike)
def test_one_device_gets_the_whole(make_shape, counts):
    shape = shape_of(make_shape, counts)
    batch = ParallelLayout(tensor_parallel_size=8).rank_batch(shape)
    assert batch.tokens == batch.all_tokens == shape.decode_seqs + shape.prefill_tokens
    assert batch.rows == shape.sampled_seqs
    assert batch[3:9] == shape[:6]
    assert not any(batch[9:])


@given(counts=alike, layout=layouts)
def test_shares_add_up_to_at_least_the_whole(make_shape, counts, layout):
    """The fullest device's share, times the devices and micro-batches it is shared out among."""
    shape, batch = shape_of(make_shape, counts), layout.rank_batch(shape_of(make_shape, counts))
    shares, ring = layout.num_batch_shares, layout.context_parallel_size
    lost = 1 - 1e-9
    assert batch.decode_seqs * shares >= shape.decode_seqs
    assert batch.decode_context_tokens * shares * ring >= shape.decode_context_tokens * lost
    assert batch.prefill_seqs * shares * ring >= shape.prefill_seqs
    assert batch.prefill_tokens * shares * ring >= shape.prefill_tokens
    assert batch.prefill_pairs * shares * ring >= shape.prefill_pairs * lost
    assert batch.prefill_context_tokens * shares * ring >= shape.prefill_context_tokens * lost
    assert batch.tokens * shares * ring >= shape.decode_seqs + shape.prefill_tokens
    assert batch.all_tokens * layout.micro_batches >= shape.decode_seqs + shape.prefill_tokens
    assert batch.rows * shares >= shape.sampled_seqs


@given(counts=alike, layout=layouts)
def test_no_share_is_larger_than_the_whole(make_shape, counts, layout):
    shape = shape_of(make_shape, counts)
    batch = layout.rank_batch(shape)
    whole = ParallelLayout().rank_batch(shape)
    assert all(mine <= all_of_it * (1 + 1e-9) for mine, all_of_it in zip(batch, whole, strict=True))
    assert batch.prefill_seqs <= batch.prefill_tokens


def test_shares_by_hand():
    """2 micro-batches x 2 attention groups: 10 decodes are 3 on the fullest; of 3 chunks its group has 2.

    900 new tokens: 2/3 of them in 2 micro-batches, one chunk each, on 2 devices of a ring: 150 each; a ring
    device holds half of the 3/10 of the decodes' contexts. Of 3 chunks two are in a micro-batch of all
    groups, 600 tokens. Beside them 5 decodes.
    """
    layout = ParallelLayout(pipeline_parallel_size=2, context_parallel_size=2, attention_data_parallel_size=2)
    batch = layout.rank_batch(IterationShape(10, 5000, 3, 900, 90_000, 1200, 13))
    assert batch.decode_seqs == 3
    assert batch.decode_context_tokens == pytest.approx(5000 * 0.3 / 2)
    assert (batch.prefill_seqs, batch.prefill_tokens) == (1, 150)
    assert batch.prefill_pairs == pytest.approx(90_000 * 2 / 3 / 4)
    assert batch.prefill_context_tokens == pytest.approx(1200 / 3)
    assert (batch.tokens, batch.all_tokens, batch.rows) == (153, 5 + 600, 4)


def test_few_sequences_leave_micro_batches_empty(make_shape):
    """4 stages: 1 to 4 decodes are one in each micro-batch, 5 are two in the fullest."""
    layout = ParallelLayout(pipeline_parallel_size=4)
    batches = [layout.rank_batch(make_shape([100] * count)) for count in (1, 4, 5)]
    assert [batch.tokens for batch in batches] == [1, 1, 2]
    assert [batch.decode_context_tokens for batch in batches] == [100, 100, 200]


@pytest.mark.parametrize(
    ("chunk", "count", "tokens"),
    [
        (100, 1, 100),
        (100, 4, 100),
        (100, 8, 200),
        (2000, 1, 2000),
        (2000, 4, 2000),
        (2000, 5, 4000),
    ],
)
def test_a_pipeline_cuts_no_chunk(make_shape, chunk, count, tokens):
    """4 stages; of 5 chunks two are in the fullest micro-batch. Pairs are shared out as tokens are."""
    shape = make_shape(chunks=[(chunk, 0)] * count)
    batch = ParallelLayout(pipeline_parallel_size=4).rank_batch(shape)
    assert batch.tokens == batch.all_tokens == batch.prefill_tokens == tokens
    assert batch.prefill_pairs == pytest.approx(shape.prefill_pairs * tokens / shape.prefill_tokens)
    assert batch.prefill_seqs == -(-count // 4)
    assert batch.prefill_context_tokens == chunk * batch.prefill_seqs


@pytest.mark.parametrize(("chunk", "tokens"), [(100, 100), (256, 256), (600, 256), (1024, 256), (2000, 500)])
def test_micro_batches_without_a_pipeline_cut_long_chunks_only(make_shape, chunk, tokens):
    """Those of attention and experts on separate devices: 4, pieces of at least 256 tokens."""
    assert ParallelLayout(num_micro_batches=4).rank_batch(make_shape(chunks=[(chunk, 0)])).tokens == tokens


def test_chunks_with_fewer_tokens_than_devices_take_their_contexts_with_them():
    """Two chunks of one token each on a ring of 4: the fullest device has one of them, and its context."""
    batch = ParallelLayout(context_parallel_size=4).rank_batch(IterationShape(0, 0, 2, 2, 2000, 2000, 2))
    assert (batch.prefill_seqs, batch.prefill_tokens, batch.prefill_context_tokens) == (1, 1, 1000)


@given(counts=st.lists(alike, min_size=1, max_size=9), layout=layouts)
def test_arrays_get_the_shares_of_numbers(make_shape, counts, layout):
    shapes = [shape_of(make_shape, one) for one in counts]
    arrays = layout.rank_batch(
        IterationShape(
            *(np.array(column) for column in zip(*[shape.counts for shape in shapes], strict=True))
        )
    )
    one_by_one = [layout.rank_batch(shape) for shape in shapes]
    for name, column in arrays._asdict().items():
        column = np.broadcast_to(column, len(shapes))
        assert column.tolist() == [getattr(batch, name) for batch in one_by_one]


@pytest.mark.parametrize(
    ("decodes", "chunks", "new", "expected"),
    [
        (0, 1, 2048, 8 * 2048),  # seven groups pad to the one with the prompt
        (16, 0, 0, 16),  # two each
        (17, 0, 0, 8 * 3),  # one group has three
        (8, 8, 800, 8 * 101),
    ],
)
def test_padded_groups_send_as_many_tokens_as_the_fullest_one(decodes, chunks, new, expected):
    padded = ParallelLayout(
        attention_data_parallel_size=8, expert_parallel_size=8, attention_data_parallel_padding=True
    )
    plain = replace(padded, attention_data_parallel_padding=False)
    shape = IterationShape(decodes, 100 * decodes, chunks, new, new * new, new, decodes + chunks)
    assert padded.rank_batch(shape).all_tokens == expected
    assert plain.rank_batch(shape).all_tokens == decodes + new
    assert padded.rank_batch(shape)._replace(all_tokens=0) == plain.rank_batch(shape)._replace(all_tokens=0)
