"""Layers whose memory of a sequence does not grow: their matrices, states and FLOPs, counted by hand."""

import pytest

from hwmodels.model import Block, MixtureOfExperts, ModelSpec, NoMlp
from hwmodels.model.attention import CompressedAttention, GroupedQueryAttention, LatentAttention, NoAttention
from hwmodels.model.recurrent import (
    BesideAttention,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    ShortConvolution,
)
from hwmodels.model.transforms import PruneWidth

MAMBA_2 = Mamba2(num_heads=64, head_dim=64, state_size=128, num_groups=8)
GQA = GroupedQueryAttention(num_heads=32, num_kv_heads=2, head_dim=128)


def sizes(attention, hidden_size, tp=1):
    return {matrix.name: (matrix.k, matrix.n) for matrix in attention.matrices(hidden_size, tp)}


def test_mamba_2_projects_x_z_b_c_and_dt_at_once():
    """Nemotron-3-Nano: 2 x 4,096 + 2 x 8 x 128 + 64 outputs."""
    assert sizes(MAMBA_2, 2688) == {"in_proj": (2688, 10304), "out_proj": (4096, 2688)}


def test_mamba_2_keeps_a_matrix_per_head_and_three_inputs_of_the_convolution():
    assert MAMBA_2.kv_bytes_per_token("bf16") == 0
    assert MAMBA_2.state_bytes("bf16") == 64 * 64 * 128 * 4 + 3 * (4096 + 2 * 8 * 128) * 2


def test_mamba_2_is_sharded_by_heads_and_replicates_groups_where_they_are_fewer():
    assert MAMBA_2.state_bytes("bf16", 4) == 16 * 64 * 128 * 4 + 3 * (1024 + 2 * 2 * 128) * 2
    assert sizes(MAMBA_2, 2688, 16)["in_proj"] == (2688, 2 * 256 + 2 * 128 + 4)
    assert not MAMBA_2.divides(3)


def test_mamba_1_scans_every_channel():
    """Jamba-1.5-Mini: 8,192 channels of 16 numbers; dt of rank 256."""
    layer = Mamba1(inner_size=8192, state_size=16, dt_rank=256)
    assert sizes(layer, 4096) == {
        "in_proj": (4096, 16384),
        "x_proj": (8192, 288),
        "dt_proj": (256, 8192),
        "out_proj": (8192, 4096),
    }
    assert layer.state_bytes("bf16") == 8192 * 16 * 4 + 3 * 8192 * 2


def test_the_gate_of_kimi_delta_attention_has_one_matrix_or_two():
    """Kimi Linear: 32 heads of 128."""
    low = KimiDeltaAttention(num_heads=32, head_dim=128)
    full = KimiDeltaAttention(num_heads=32, head_dim=128, full_rank_gate=True)
    assert sizes(low, 2304)["gate_b_proj"] == (128, 4096)
    assert sizes(full, 2304)["gate_proj"] == (2304, 4096)
    assert low.state_bytes("bf16") == 32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2


def test_lightning_attention_and_short_convolutions_have_small_states():
    assert LightningAttention(num_heads=64, head_dim=128).state_bytes("bf16") == 64 * 128 * 128 * 2
    assert ShortConvolution(width=2048).state_bytes("bf16") == 2 * 2048 * 2


def test_attention_beside_a_state_space_layer_has_the_memory_of_both():
    both = BesideAttention(attention=GQA, recurrent=MAMBA_2)
    assert both.kv_bytes_per_token("bf16") == GQA.kv_bytes_per_token("bf16")
    assert both.state_bytes("bf16") == MAMBA_2.state_bytes("bf16")
    assert sizes(both, 2688) == {**sizes(GQA, 2688), **sizes(MAMBA_2, 2688)}
    assert both.divides(2)
    assert not both.divides(6)


def test_values_may_be_narrower_than_keys():
    """MiMo-V2: keys of 192, values of 128."""
    layer = GroupedQueryAttention(num_heads=64, num_kv_heads=4, head_dim=192, v_head_dim=128)
    assert sizes(layer, 4096) == {
        "qkv_proj": (4096, 64 * 192 + 4 * (192 + 128)),
        "o_proj": (64 * 128, 4096),
    }
    assert layer.kv_bytes_per_token("bf16") == 4 * 320 * 2
    assert layer.least_pair_flops() == 2 * 64 * 320


def test_an_indexer_of_grouped_query_attention_keeps_a_key():
    """MiniMax-M3: 16 blocks of 128 tokens; 4 index heads and one key of 128."""
    layer = GroupedQueryAttention(
        num_heads=64, num_kv_heads=4, head_dim=128, sparse_top_k=2048, index_n_heads=4, index_head_dim=128
    )
    assert layer.kv_bytes_per_token("bf16") == 2 * 4 * 128 * 2 + 128 * 2
    assert sizes(layer, 6144)["index_qk_proj"] == (6144, 5 * 128)
    with pytest.raises(
        ValueError, match=r"index_n_heads=0: must be (a whole number )?>= 1 where sparse_top_k"
    ):
        GroupedQueryAttention(num_heads=4, num_kv_heads=4, head_dim=8, sparse_top_k=16)


def test_layers_that_share_an_index_have_no_indexer():
    """GLM-5.2."""
    own = LatentAttention(
        num_heads=64,
        q_lora_rank=2048,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        sparse_top_k=2048,
        index_n_heads=32,
        index_head_dim=128,
    )
    shared = type(own)(**{name: getattr(own, name) for name in own.__slots__} | {"shares_index": True})
    assert own.kv_bytes_per_token("bf16") - shared.kv_bytes_per_token("bf16") == 128 + 4
    assert {"index_q_proj", "index_k_proj", "index_weights_proj"} == {*sizes(own, 6144)} - {
        *sizes(shared, 6144)
    }


V4 = {
    "num_heads": 64,
    "head_dim": 512,
    "rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "window_tokens": 128,
}
INDEXER = {"sparse_top_k": 512, "index_n_heads": 64, "index_head_dim": 128}


def test_compressed_entries_grow_by_their_share_of_the_context():
    window, sparse, heavy = (
        CompressedAttention(**V4),
        CompressedAttention(**V4, ratio=4, **INDEXER),
        CompressedAttention(**V4, ratio=128),
    )
    assert window.kv_bytes_per_token("bf16") == 0
    assert sparse.kv_bytes_per_token("bf16") == (1024 + 132) / 4
    assert heavy.kv_bytes_per_token("bf16") == 1024 / 128
    assert heavy.kv_bytes_per_token("fp8") == (448 + 128 + 8) / 128
    assert window.state_bytes("bf16") == 128 * 1024
    assert sparse.state_bytes("bf16") == 128 * 1024 + 2 * 4 * 2 * (512 + 128) * 4


def test_outputs_of_compressed_attention_are_projected_in_groups():
    matrices = sizes(CompressedAttention(**V4), 4096)
    assert matrices["o_a_proj"] == (8 * 512, 8 * 1024)
    assert matrices["o_b_proj"] == (8 * 1024, 4096)
    assert sizes(CompressedAttention(**V4), 4096, 4)["o_a_proj"] == (8 * 512, 2 * 1024)


def test_hyper_connections_mix_the_residual_streams_twice_per_layer():
    layer = CompressedAttention(**V4, num_streams=4)
    [matrix] = [m for m in layer.matrices(4096) if m.name == "hyper_connection"]
    assert (matrix.k, matrix.n, matrix.count) == (4 * 4096, 4 * 6, 2)


def test_experts_may_be_narrower_than_the_hidden_state():
    """Nemotron-3-Super: 512 experts of 2,688 in a width of 1,024, and one matrix down to it, one up."""
    mlp = MixtureOfExperts(num_experts=512, top_k=22, intermediate_size=2688, latent_size=1024, gated=False)
    found = {m.name: (m.k, m.n, m.count) for m in mlp.matrices(4096)}
    assert found == {
        "router": (4096, 512, 1),
        "expert_up_proj": (1024, 2688, 512),
        "expert_down_proj": (2688, 1024, 512),
        "latent_down_proj": (4096, 1024, 1),
        "latent_up_proj": (1024, 4096, 1),
    }
    assert mlp.active_elements(4096) == 4096 * 512 + 22 * 2 * 1024 * 2688 + 2 * 4096 * 1024


def model_of(*blocks):
    return ModelSpec(
        name="hybrid", hidden_size=2688, vocab_size=1000, max_position_embeddings=4096, blocks=blocks
    )


def test_a_layer_may_be_a_mixer_or_an_mlp_alone():
    mixer = Block(count=2, attention=MAMBA_2, mlp=NoMlp(), num_norms=1)
    experts = MixtureOfExperts(num_experts=8, top_k=2, intermediate_size=64)
    model = model_of(mixer, Block(count=3, attention=NoAttention(), mlp=experts, num_norms=1))
    assert model.num_layers == 5
    assert model.state_bytes_per_sequence() == 2 * MAMBA_2.state_bytes("bf16")
    assert model.kv_bytes_per_token() == 0
    by_hand = 2 * (2688 * 10304 + 4096 * 2688) + 3 * (2688 * 8 + 8 * 3 * 2688 * 64)
    assert sum(matrix.elements for matrix in model.layer_matrices()) == by_hand


def test_width_is_pruned_where_there_is_an_mlp_and_heads_only_of_attention():
    mixer = Block(count=1, attention=GQA, mlp=NoMlp())
    assert PruneWidth(intermediate=0.5).applied(model_of(mixer)).blocks[0].mlp == NoMlp()
    with pytest.raises(ValueError, match=r"heads=0\.5: Mamba2 layers cannot be pruned by heads; must be 1"):
        PruneWidth(heads=0.5).applied(model_of(Block(count=1, attention=MAMBA_2, mlp=NoMlp())))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mamba2(num_heads=6, head_dim=8, state_size=8, num_groups=4), "num_groups=4: must divide"),
        (lambda: Mamba2(num_heads=6, head_dim=0, state_size=8), "head_dim=0: must be >= 1"),
        (
            lambda: Mamba1(inner_size=8, state_size=8, dt_rank=1, state_dtype="fp8"),
            "state_dtype=fp8: must be",
        ),
        (lambda: CompressedAttention(**{**V4, "o_groups": 7}), "o_groups=7: must divide num_heads=64"),
        (
            lambda: MixtureOfExperts(num_experts=2, top_k=1, intermediate_size=8, latent_size=-1),
            "latent_size=-1: must be >= 1, or null",
        ),
    ],
)
def test_rejects_impossible_shapes(make, message):
    with pytest.raises(ValueError, match=message):
        make()
