"""The operators of a mixture of experts."""

from dataclasses import replace

from hwmodels.assembly import expert_library
from tests.hwmodels.assembly.listed import BALANCED, Listed, experts, make_model


def test_a_token_visits_top_k_experts_and_reads_their_weights(site, make_shape):
    """An expert: 3 x 64 x 40 = 7,680 weights. 1 token: 2 experts; 3 tokens, evenly: 6; 100 tokens: all 8."""
    for tokens, active in ((1, 2), (3, 6), (100, 8)):
        listed = Listed(site(make_model(mlp=experts())), make_shape([1] * tokens))
        assert listed.once("experts", "flops") == 2 * tokens * 2 * 7680
        assert listed.once("experts", "stored_bytes") == active * 7680 * 2
        assert listed.once("router", "flops") == 2 * tokens * 64 * 8


def test_shared_experts_see_every_token(site, make_shape):
    listed = Listed(site(make_model(mlp=experts(shared_intermediate_size=80))), make_shape([1] * 5))
    assert listed.once("shared_gate_up_proj", "flops") == 2 * 5 * 64 * 160
    assert listed.once("shared_down_proj", "flops") == 2 * 5 * 80 * 64


def test_a_gate_scales_the_shared_experts(site, make_shape):
    """5 tokens of 128 bytes: one reads the hidden state, one adds two tensors into a third."""
    mlp = experts(shared_intermediate_size=80, shared_gate=True)
    listed = Listed(site(make_model(mlp=mlp)), make_shape([1] * 5))
    assert listed.once("shared_gate", "bytes_moved") == 5 * 128
    assert listed.once("shared_sum", "bytes_moved") == 5 * 3 * 128


def test_experts_are_stored_in_their_own_format(site, make_shape):
    model = make_model(mlp=experts(), moe_weights="mxfp4")
    listed = Listed(site(model), make_shape([1] * 100))
    assert listed.once("experts", "stored_bytes") == 8 * 7680 * (0.5 + 1 / 32)
    assert listed.once("router", "stored_bytes") == 64 * 8 * 2


def test_sglangs_own_kernels_run_unless_tokens_travel_to_the_experts(site):
    own, auto = (replace(BALANCED, moe_backend=backend) for backend in ("sglang", "auto"))
    assert expert_library(site(kernels=own, tensor_parallel_size=4)) == "sglang"
    assert expert_library(site(kernels=own, attention_data_parallel_size=4)) == "vllm"
    assert expert_library(site(kernels=auto, tensor_parallel_size=4)) == "vllm"
