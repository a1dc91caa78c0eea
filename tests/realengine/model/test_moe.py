"""Mixtures of experts: logits and greedy tokens against a textbook model, experts in int8, every source."""

import pytest
import torch

from kernels.moe import moe_gemm, moe_gemm_reference, moe_mlp, moe_mlp_reference
from kernels.moe_routing import moe_align, moe_route_reference
from kernels.w8a16 import Int8Weight
from realengine.model.architecture import Architecture
from realengine.model.backend import TORCH
from realengine.model.decoder import Decoder, Mlp
from realengine.model.kv_cache import KvCache
from realengine.model.moe import Experts
from realengine.model.quantization import quantised
from realengine.weights.load import load_weights
from tests.realengine.checkpoints import (
    QWEN3_MOE,
    as_gguf,
    gguf_metadata,
    random_checkpoint,
    write_config,
    write_gguf,
)
from tests.realengine.eager import dense, eager_logits
from tests.realengine.model.test_decoder import CPU, LLAMA, MOE
from tests.realengine.steps import all_logits, batch_of, prompts

torch.set_num_threads(1)

VARIANTS = {
    "all_layers": {},
    "not_renormalised": {"norm_topk_prob": False},
    "dense_first": {"mlp_only_layers": [0]},
    "every_second": {"num_hidden_layers": 3, "decoder_sparse_step": 2},
    "one_choice": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "all_choices": {"num_experts_per_tok": 6},
}


def make(fields, quantization=None):
    """Returns (architecture, weights, decoder) with a router that tells experts apart."""
    spec = Architecture.from_hf(LLAMA | MOE | fields)
    plain = load_weights(None, spec, torch.float32, CPU, seed=1)
    weights = {}
    for name, weight in plain.items():
        scaled = weight if name.endswith("norm.weight") else weight * (50 if "router" in name else 10)
        weights[name] = quantised(name, scaled, quantization)
    return spec, weights, Decoder(spec, weights, TORCH, 128)


def assert_as_eager(spec, weights, decoder):
    sequences = prompts(spec.vocab_size)
    cache = KvCache(spec, 70, 4, torch.float32, CPU)
    for tokens, logits in zip(sequences, all_logits(decoder, cache, sequences), strict=True):
        expected = eager_logits(spec, weights, torch.tensor(tokens))
        torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_logits_of_mixed_batches_are_those_of_a_textbook_model(fields):
    assert_as_eager(*make(fields))


def test_the_layers_with_experts_are_those_of_the_architecture():
    for fields, expected in (
        (VARIANTS["all_layers"], [Experts, Experts]),
        (VARIANTS["dense_first"], [Mlp, Experts]),
        (VARIANTS["every_second"], [Mlp, Experts, Mlp]),
    ):
        _, _, decoder = make(fields)
        assert [type(layer.mlp) for layer in decoder._layers.values()] == expected


def test_greedy_tokens_are_those_of_a_textbook_model():
    """The sequences decode beside each other, 12 tokens each."""
    spec, weights, decoder = make({})
    sequences = prompts(spec.vocab_size, lengths=(3, 9, 14))
    cache = KvCache(spec, 40, 4, torch.float32, CPU)
    tables = torch.randperm(39, generator=torch.Generator().manual_seed(0))[:30].view(3, 10).int() + 1
    expected = []
    for tokens in sequences:
        known = list(tokens)
        for _ in range(12):
            known.append(int(eager_logits(spec, weights, torch.tensor(known))[-1].argmax()))
        expected.append(known)
    rows = [(i, 0, len(tokens)) for i, tokens in enumerate(sequences)]
    for _ in range(12):
        last = torch.tensor([size for _, _, size in rows]).cumsum(0) - 1
        logits = decoder.logits(batch_of(rows, sequences, tables, 4, sampled_rows=last), cache)
        for tokens, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            tokens.append(token)
        rows = [(i, len(tokens) - 1, 1) for i, tokens in enumerate(sequences)]
    assert sequences == expected


def test_logits_of_experts_in_int8_are_those_of_the_rounded_weights():
    spec, weights, decoder = make({"mlp_only_layers": [0]}, "w8a16")
    assert isinstance(weights["layers.1.experts_down.weight"], Int8Weight)
    assert_as_eager(spec, weights, decoder)


@pytest.mark.parametrize("source", ["safetensors", "gguf"])
def test_experts_of_a_checkpoint_are_computed(tmp_path, source):
    config = QWEN3_MOE | {"mlp_only_layers": []}  # GGUF cannot say that a layer has none
    checkpoint = {name: tensor * 0.3 for name, tensor in random_checkpoint(config).items()}
    if source == "safetensors":
        write_config(tmp_path, config)
        pytest.importorskip("safetensors.torch").save_file(checkpoint, tmp_path / "model.safetensors")
        where = tmp_path
    else:
        where = write_gguf(tmp_path / "m.gguf", gguf_metadata(config), as_gguf(config, checkpoint))
    spec = Architecture.from_path(where)
    assert (spec.num_experts, spec.num_experts_per_tok, spec.norm_topk_prob) == (3, 2, True)
    weights = load_weights(where, spec, torch.float32, CPU)
    assert_as_eager(spec, weights, Decoder(spec, weights, TORCH, 128))


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 18])
def test_the_grouped_gemm_takes_int8_experts(tokens, gated):
    """In fp16, in the interpreter; an expert without tokens must not be read."""
    weight = Int8Weight(
        torch.randint(-127, 128, (3, 34, 72), dtype=torch.int8, generator=torch.Generator().manual_seed(1)),
        random(3, 34, seed=2).abs() / 127,
    )
    x = random(tokens, 72).half() * 72**-0.5
    chosen = torch.zeros(tokens, 2, dtype=torch.int32)
    chosen[:, 1] = 2
    weight.scales_N[1] = torch.nan
    alignment = moe_align(chosen, 3, 16)
    found = moe_gemm(x, weight, alignment, 2 * tokens, gated=gated)
    torch.testing.assert_close(
        found, moe_gemm_reference(x, weight, alignment, 2 * tokens, gated=gated), rtol=2e-3, atol=2e-3
    )
    by_hand = torch.stack([x.double()[e // 2] @ dense(weight)[2 * (e % 2)].T for e in range(2 * tokens)])
    if gated:
        gate, up = by_hand.chunk(2, dim=-1)
        by_hand = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(found.double(), by_hand, rtol=5e-3, atol=5e-3)


def test_int8_experts_equal_the_same_experts_in_fp32():
    spec = Architecture.from_hf(LLAMA | MOE)
    weights = load_weights(None, spec, torch.float32, CPU, quantization="w8a16")
    gate_up, down = (weights[f"layers.0.experts_{of}.weight"] for of in ("gate_up", "down"))
    x, routing = random(5, 48), moe_route_reference(random(5, 6, seed=1), 2)
    expected = moe_mlp_reference(x, dense(gate_up).float(), dense(down).float(), routing)
    torch.testing.assert_close(moe_mlp_reference(x, gate_up, down, routing), expected)
    on_triton = moe_mlp(x.half(), gate_up, down, routing).float()
    assert (on_triton - expected).norm() < 5e-3 * expected.norm()


def test_int8_experts_without_fitting_scales_are_refused():
    alignment = moe_align(torch.zeros(1, 2, dtype=torch.int32), 2, 16)
    x, values = torch.zeros(1, 16).half(), torch.zeros(2, 8, 16, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"scales are torch.float32 \[2, 4\]; .*\[2, 8\]"):
        moe_gemm(x, Int8Weight(values, torch.zeros(2, 4)), alignment, 2, gated=False)
    with pytest.raises(ValueError, match=r"weight torch.int8; .*or int8 with scales"):
        moe_gemm(x, values, alignment, 2, gated=False)
