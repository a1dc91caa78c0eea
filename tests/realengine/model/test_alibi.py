"""Decoders with linear biases of attention, against a textbook model and the published slopes."""

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import torch
from safetensors.torch import save_file

from realengine.model.architecture import Architecture
from realengine.model.backend import TORCH
from realengine.model.decoders import alibi_slopes, decoder_of
from realengine.model.kv_cache import KvCache
from realengine.weights.load import load_weights
from realengine.weights.table import HUGGING_FACE, expected
from tests.realengine.eager import eager_logits
from tests.realengine.steps import all_logits, prompts

torch.set_num_threads(1)

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "baichuan",
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "model_max_length": 128,
}


@pytest.fixture(autouse=True)
def wide_weights(monkeypatch):
    """Draws weights with which attention is far from uniform."""
    monkeypatch.setattr("realengine.weights.load.STANDARD_DEVIATION", 0.2)


def test_logits_of_mixed_batches_are_those_of_a_textbook_model():
    spec = Architecture.from_hf(CONFIG)
    assert spec.alibi
    assert spec.max_position_embeddings == 128
    weights = load_weights(None, spec, torch.float32, CPU, seed=1)
    decoder = decoder_of(spec, weights, TORCH, 128)
    sequences = prompts(97)
    found = all_logits(decoder, KvCache(spec, 70, 4, torch.float32, CPU), sequences)
    for tokens, logits in zip(sequences, found, strict=True):
        wanted = eager_logits(spec, weights, torch.tensor(tokens))
        torch.testing.assert_close(logits.double(), wanted, rtol=1e-4, atol=1e-4)


def test_slopes_are_the_published_ones():
    """Of the authors' code, for 8 heads and for 12: those of 8 heads, then every second one of 16."""
    eight = [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(8) == pytest.approx(eight)
    assert alibi_slopes(12) == pytest.approx([*eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_the_7b_models_rotate():
    spec = Architecture.from_hf(CONFIG | {"hidden_size": 4096, "num_attention_heads": 32})
    assert not spec.alibi
    assert spec.head_dim == 128


def test_a_checkpoint_s_projections_and_head_are_read(tmp_path):
    spec = Architecture.from_hf(CONFIG | {"vocab_size": 125_696, "num_hidden_layers": 1})
    generator = torch.Generator().manual_seed(0)
    stored = {
        part.name: torch.randn(part.shape, generator=generator)
        for weight in expected(spec, HUGGING_FACE)
        for part in weight.parts
    }
    assert "model.layers.0.self_attn.W_pack.weight" in stored
    save_file(stored, tmp_path / "model.safetensors")
    weights = load_weights(tmp_path, spec, torch.float32, CPU)
    assert torch.equal(weights["layers.0.qkv.weight"], stored["model.layers.0.self_attn.W_pack.weight"])
    hidden = torch.randn(3, 64, generator=generator)
    head = stored["lm_head.weight"]
    wanted = hidden @ (head / head.norm(dim=1, keepdim=True)).T
    torch.testing.assert_close(decoder_of(spec, weights, TORCH, 128).head(hidden), wanted)
