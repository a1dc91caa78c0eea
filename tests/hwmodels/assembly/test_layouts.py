"""The operators of one rank of several: shares of the work, and messages."""

from functools import partial

import pytest

from hwmodels.iterations.layout import ParallelLayout
from hwmodels.operators.collectives import CollectiveCurve, collective_seconds
from tests.hwmodels.assembly.listed import Listed, experts, grouped, make_model

EVEN = [
    {"tensor_parallel_size": 4},
    {"tensor_parallel_size": 4, "sequence_parallel": True},
    {"attention_data_parallel_size": 2},
    {"context_parallel_size": 2},
    {"pipeline_parallel_size": 2, "num_micro_batches": 1},
    {"tensor_parallel_size": 2, "attention_data_parallel_size": 2, "context_parallel_size": 2},
]


@pytest.mark.parametrize("layout", EVEN, ids=lambda layout: " ".join(name[:8] for name in layout))
@pytest.mark.parametrize("expert_parallel_size", [None, 1, 2])
def test_the_ranks_of_a_stage_share_the_flops_of_the_model(site, make_shape, layout, expert_parallel_size):
    """Everything divides evenly; the list of a pipeline holds the layers of all stages.

    Left out: the router, which every tensor-parallel rank computes, and what each device of a ring computes:
    the LM head, the projections of decodes.
    """
    model = make_model() if expert_parallel_size is None else make_model(mlp=experts())
    ranks = ParallelLayout(**layout).stage_size
    if expert_parallel_size and ranks % expert_parallel_size == 0:
        layout = {**layout, "expert_parallel_size": expert_parallel_size}
    decodes = [] if "context_parallel_size" in layout else [30] * 8
    shape = make_shape(decodes, [(64, 0)] * 4, completed=False)
    rank, whole = Listed(site(model, **layout), shape), Listed(site(model), shape)
    names = {op.name for op in whole.operators} - {"router", "lm_head"}
    for name in names:
        assert ranks * rank.total("flops", name) == whole.total("flops", name), name
    assert whole.total("flops", *names) > 0


def test_tensor_parallelism_sums_hidden_states_twice_a_layer_and_gathers_logits(site, make_shape):
    """10 tokens of 128 bytes; 4 sampled rows of 4 x 250 logits of 2 bytes."""
    listed = Listed(site(tensor_parallel_size=4), make_shape([5, 6, 7], [(7, 0)]))
    calls = {op.name: op.calls for op in listed.operators if op.is_message}
    assert calls == {
        "embedding_all_reduce": 1,
        "attention_all_reduce": 4,
        "mlp_all_reduce": 4,
        "logits_all_gather": 1,
    }
    for name in ("embedding_all_reduce", "attention_all_reduce", "mlp_all_reduce"):
        assert listed.once(name, "bytes_moved") == 10 * 128
    assert listed.once("logits_all_gather", "bytes_moved") == 4 * 1000 * 2


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_in_a_busy_engine_a_sum_waits_for_every_other_rank(site, make_shape, sequence_parallel):
    """1 us for each of 3 ranks. What follows a sum finds the ranks together: a gather waits for none."""
    layout = {"tensor_parallel_size": 4, "sequence_parallel": sequence_parallel}
    alone, busy = (Listed(site(peer_wait_s=wait_s, **layout), make_shape([5, 6, 7])) for wait_s in (0, 1e-6))
    added_s = {
        op.name: busy.once(op.name, "seconds") - alone.once(op.name, "seconds")
        for op in alone.operators
        if op.is_message
    }
    assert added_s.pop("logits_all_gather") == 0
    assert {name for name, seconds in added_s.items() if seconds} == {
        name for name in added_s if name.endswith("reduce_scatter" if sequence_parallel else "all_reduce")
    }
    assert all(seconds in (0, pytest.approx(3e-6)) for seconds in added_s.values())


def test_sequence_parallelism_cuts_norms_and_each_all_reduce_in_two(site, make_shape):
    shape = make_shape([1] * 8)
    plain, cut = (Listed(site(tensor_parallel_size=4, sequence_parallel=sp), shape) for sp in (False, True))
    assert cut.total("bytes_moved", "mlp_norm") == plain.total("bytes_moved", "mlp_norm") / 4
    calls = {op.name: op.calls for op in cut.operators if op.is_message}
    assert calls["attention_reduce_scatter"] == calls["attention_all_gather"] == 4
    assert not any("all_reduce" in name for name in calls)
    assert cut.once("mlp_reduce_scatter", "bytes_moved") == plain.once("mlp_all_reduce", "bytes_moved")


def test_a_micro_batch_passes_all_stages_once(site, make_shape):
    """4 layers in 2 stages: 12 decodes, in halves."""
    listed = Listed(site(pipeline_parallel_size=2), make_shape([9] * 12))
    assert (listed.calls("qkv_proj"), listed.calls("lm_head"), listed.calls("stage_send_recv")) == (4, 1, 1)
    assert listed.batch.tokens == 6
    assert listed.once("stage_send_recv", "bytes_moved") == 6 * 128
    uncut = Listed(site(pipeline_parallel_size=2, num_micro_batches=1), make_shape([9] * 12))
    assert (uncut.calls("qkv_proj"), uncut.batch.tokens) == (4, 12)


def test_a_ring_passes_keys_or_queries_whichever_are_fewer(site, make_shape):
    """Ring of 4. A prompt of 400: keys and values, 400 x 256 bytes; each device sends three quarters of them.
    Behind 100,000 cached tokens: the queries of 400 tokens and their results, 2 x 400 x 256 bytes.
    """
    fresh = Listed(site(context_parallel_size=4), make_shape(chunks=[(400, 0)]))
    behind = Listed(site(context_parallel_size=4), make_shape(chunks=[(400, 100_000)]))
    assert fresh.once("ring_attention", "bytes_moved") == 400 * 256 * 3 / 4
    assert behind.once("ring_attention", "bytes_moved") == 2 * 400 * 256 * 3 / 4


def test_a_ring_sums_the_partial_results_of_decodes(site, make_shape):
    listed = Listed(site(context_parallel_size=4), make_shape([400] * 6))
    assert listed.once("context_all_reduce", "bytes_moved") == 6 * 256
    assert listed.once("attention_decode", "stored_bytes") == 6 * 100 * 256


def test_a_ring_whose_neighbours_are_in_other_nodes_goes_between_nodes(site, make_shape, toy_device):
    """8 tensor-parallel ranks fill a node, so each device's ring of 2 spans two."""
    shape, curve = make_shape([400] * 6, [(400, 0)]), CollectiveCurve()
    model = make_model(grouped(num_kv_heads=8))
    listed = Listed(site(model, tensor_parallel_size=8, context_parallel_size=2), shape)
    for name, collective in (("ring_attention", "send_recv"), ("context_all_reduce", "all_reduce")):
        price = partial(collective_seconds, collective)
        size = listed.once(name, "bytes_moved")
        assert listed.once(name, "seconds") == price(size, 2, toy_device, curve, nodes=2)
        assert listed.once(name, "seconds") > price(size, 2, toy_device, curve, nodes=1)


def test_tensor_parallelism_goes_beyond_a_node(site, make_shape, toy_device):
    """16 ranks in two nodes of 8: every sum crosses the link between them."""
    shape, curve = make_shape([5, 6, 7]), CollectiveCurve()
    listed = Listed(site(make_model(grouped(num_heads=16, num_kv_heads=16)), tensor_parallel_size=16), shape)
    size = listed.once("attention_all_reduce", "bytes_moved")
    seconds = listed.once("attention_all_reduce", "seconds")
    assert seconds == collective_seconds("all_reduce", size, 16, toy_device, curve, nodes=2)
    # Start, 14 hops inside the node, two between the nodes; 384 bytes take no time.
    hops_s = 14 * curve.hop_s + 2 * toy_device.inter_node.latency_s
    assert seconds == pytest.approx(curve.start_s + hops_s, rel=1e-2)


def test_experts_on_other_devices_get_their_tokens_by_all_to_all(site, make_shape):
    """4 attention groups x 2 ranks, 8 decodes a group. Each rank sends half of their copies: 2 x 8 / 2."""
    layout = {"tensor_parallel_size": 2, "attention_data_parallel_size": 4, "expert_parallel_size": 8}
    listed = Listed(site(make_model(mlp=experts()), **layout), make_shape([9] * 32))
    for name in ("expert_dispatch", "expert_combine"):
        assert listed.calls(name) == 4
        assert listed.once(name, "bytes_moved") == 2 * 8 / 2 * 128
    assert listed.of("mlp_all_reduce") == []


def test_a_token_has_no_more_copies_than_devices_with_experts(site, make_shape):
    mlp = experts(top_k=6)
    layout = {"attention_data_parallel_size": 2, "expert_parallel_size": 2}
    listed = Listed(site(make_model(mlp=mlp), **layout), make_shape([9] * 32))
    assert listed.once("expert_dispatch", "bytes_moved") == 2 * 16 * 128


@pytest.mark.parametrize("name", ["attention_data_parallel_size", "context_parallel_size"])
def test_experts_cut_over_all_devices_get_every_token(site, make_shape, name):
    """32 new tokens, 8 on each of 4 devices: gathered, multiplied with a slice of each expert, summed."""
    listed = Listed(site(make_model(mlp=experts()), **{name: 4}), make_shape(chunks=[(8, 0)] * 4))
    assert listed.once("expert_dispatch", "bytes_moved") == 32 * 128
    assert listed.once("expert_combine", "bytes_moved") == 32 * 128
    assert listed.once("experts", "flops") == 2 * 32 * 2 * 7680 / 4
    assert listed.once("experts", "stored_bytes") == 8 * 7680 / 4 * 2


def test_tensor_parallel_experts_need_no_dispatch(site, make_shape):
    listed = Listed(
        site(make_model(mlp=experts()), tensor_parallel_size=4, expert_parallel_size=4), make_shape([9] * 32)
    )
    assert listed.of("expert_dispatch") == []
    assert listed.calls("mlp_all_reduce") == 4
