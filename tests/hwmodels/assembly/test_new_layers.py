"""Operators of state-space layers, of compressed entries, of selected blocks, and of experts in a width."""

import pytest

from hwmodels.model import Block, NoAttention, NoMlp
from hwmodels.model.attention import CompressedAttention
from hwmodels.model.recurrent import (
    BesideAttention,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    ShortConvolution,
)
from tests.hwmodels.assembly.listed import Listed, experts, grouped, make_model

MAMBA_2 = Mamba2(num_heads=4, head_dim=8, state_size=16, num_groups=2)
RECURRENT = {
    "mamba 2": MAMBA_2,
    "mamba 1": Mamba1(inner_size=128, state_size=8, dt_rank=4),
    "kimi delta": KimiDeltaAttention(num_heads=4, head_dim=16),
    "lightning": LightningAttention(num_heads=4, head_dim=16),
    "short convolution": ShortConvolution(width=64),
}


@pytest.mark.parametrize("layer", RECURRENT.values(), ids=RECURRENT)
def test_a_recurrent_layer_moves_a_state_that_no_context_grows(site, make_shape, layer):
    model = make_model(layer)
    short, long = (Listed(site(model), make_shape([tokens] * 3)) for tokens in (1, 4000))
    name = f"{layer.scan_name}_decode"
    assert short.once(name, "bytes_moved") == 2 * 3 * layer.state_bytes("bf16")
    assert short.total("seconds") == long.total("seconds")
    assert short.once(name, "flops") == 3 * layer.token_flops()


@pytest.mark.parametrize("layer", RECURRENT.values(), ids=RECURRENT)
def test_a_chunk_costs_the_flops_of_its_tokens(site, make_shape, layer):
    listed = Listed(site(make_model(layer)), make_shape([], [(20, 7)]))
    assert listed.once(f"{layer.scan_name}_prefill", "flops") == 20 * layer.chunk_token_flops()
    projected = sum(2 * matrix.elements * 20 for matrix in layer.matrices(64))
    of_mlp = 2 * 20 * 3 * 64 * 160
    assert listed.total("flops", components=("gemm",)) == 4 * (projected + of_mlp)


def test_attention_beside_a_state_space_layer_has_the_operators_of_both(site, make_shape):
    listed = Listed(
        site(make_model(BesideAttention(attention=grouped(), recurrent=MAMBA_2))), make_shape([50])
    )
    assert listed.calls("attention_decode") == listed.calls("state_space_scan_decode") == 4
    assert listed.calls("o_proj") == listed.calls("out_proj") == 4


def test_a_layer_without_a_mixer_or_without_an_mlp_has_no_operators_of_it(site, make_shape):
    mixers = Block(count=3, attention=MAMBA_2, mlp=NoMlp(), num_norms=1)
    mlps = Block(count=2, attention=NoAttention(), mlp=experts(), num_norms=1)
    model = make_model(blocks=(mixers, mlps))
    listed = Listed(site(model, tensor_parallel_size=2), make_shape([5]))
    assert (listed.calls("attention_norm"), listed.calls("mlp_norm")) == (3, 2)
    assert (listed.calls("attention_all_reduce"), listed.calls("mlp_all_reduce")) == (3, 2)
    assert (listed.calls("in_proj"), listed.calls("experts")) == (3, 2)


V4 = {
    "num_heads": 8,
    "head_dim": 32,
    "rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 4,
    "o_lora_rank": 16,
    "window_tokens": 64,
}
INDEXER = {"sparse_top_k": 16, "index_n_heads": 2, "index_head_dim": 16}


def test_compressed_attention_reads_the_window_and_an_entry_per_group(site, make_shape):
    """3 sequences of 1,000 tokens, 64 in the window; 1,000 / 128 entries of 32 x 2 bytes."""
    listed = Listed(site(make_model(CompressedAttention(**V4, ratio=128))), make_shape([1000] * 3))
    assert listed.once("attention_decode_window", "stored_bytes") == 3 * 64 * 64
    assert listed.once("attention_decode_compressed", "stored_bytes") == pytest.approx(3 * 1000 / 128 * 64)
    assert listed.once("attention_decode_window", "flops") == 3 * 64 * 2 * 8 * 2 * 32
    assert not listed.of("indexer_decode")


def test_an_indexer_limits_the_entries_that_are_read(site, make_shape):
    """4 tokens per entry: 250 entries are scored, 16 are attended to."""
    listed = Listed(site(make_model(CompressedAttention(**V4, ratio=4, **INDEXER))), make_shape([1000] * 3))
    assert listed.once("indexer_decode", "flops") == 2 * 2 * 16 * 3 * 250
    assert listed.once("indexer_decode", "stored_bytes") == 3 * 250 * (16 + 4)
    assert listed.once("attention_decode_compressed", "stored_bytes") == 3 * 16 * 64


def test_a_layer_with_a_window_alone_costs_the_same_for_any_longer_context(site, make_shape):
    times = [
        Listed(site(make_model(CompressedAttention(**V4))), make_shape([tokens])).total("seconds")
        for tokens in (64, 4000)
    ]
    assert times[0] == times[1]


def test_hyper_connections_move_all_residual_streams(site, make_shape):
    [with_streams, without] = [
        Listed(site(make_model(CompressedAttention(**V4, num_streams=n))), make_shape([10])) for n in (4, 1)
    ]
    assert with_streams.once("hyper_connections", "bytes_moved") == 10 * 64 * 2
    assert not without.of("hyper_connections")


def test_selected_tokens_are_read_and_all_are_scored(site, make_shape):
    """MiniMax-M3: 32 of 100 tokens; 2 KV heads would keep 2 x 4 x 16 x 2 bytes each."""
    sparse = grouped(sparse_top_k=32, index_n_heads=2, index_head_dim=16)
    listed = Listed(site(make_model(sparse)), make_shape([100] * 3))
    assert listed.once("attention_decode_window_32", "stored_bytes") == 3 * 32 * 2 * 4 * 16 * 2
    assert listed.once("indexer_decode", "stored_bytes") == 3 * 100 * 16 * 2
    assert listed.once("indexer_decode", "flops") == 3 * 100 * 2 * 2 * 16


def test_narrower_values_are_written_and_read_narrower(site, make_shape):
    narrow = grouped(v_head_dim=8)
    listed = Listed(site(make_model(narrow)), make_shape([100]))
    assert listed.once("attention_decode", "stored_bytes") == 100 * 4 * (16 + 8) * 2
    assert listed.once("kv_write", "bytes_moved") == 4 * (16 + 8) * (2 + 2)
    assert listed.once("o_proj", "flops") == 2 * 8 * 8 * 64


def test_tokens_travel_to_narrow_experts_in_their_width(site, make_shape):
    wide, narrow = (
        Listed(
            site(
                make_model(mlp=experts(latent_size=size)),
                attention_data_parallel_size=2,
                expert_parallel_size=2,
            ),
            make_shape([10] * 4),
        )
        for size in (None, 16)
    )
    assert narrow.once("expert_dispatch", "bytes_moved") * 4 == wide.once("expert_dispatch", "bytes_moved")
    assert narrow.once("latent_down_proj", "flops") == 2 * 64 * 16 * 2
    assert not wide.of("latent_down_proj")
