"""AWQ and GPTQ checkpoints in 4 bits, packed here word by word: loaded, shared among ranks, refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="reads the package safetensors")

from kernels.int4_weight import Int4Weight  # noqa: E402
from realengine.model.architecture import Architecture  # noqa: E402
from realengine.model.backend import TORCH  # noqa: E402
from realengine.model.decoder import Decoder  # noqa: E402
from realengine.model.kv_cache import KvCache  # noqa: E402
from realengine.weights.load import load_weights  # noqa: E402
from realengine.weights.quantized_formats import PackedFormat  # noqa: E402
from tests.realengine.checkpoints import LLAMA, QWEN2, random_checkpoint  # noqa: E402
from tests.realengine.eager import dense, eager_logits  # noqa: E402
from tests.realengine.steps import all_logits, prompts  # noqa: E402

torch.set_num_threads(1)

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(nibbles, axis, order=range(8)):
    """Packs eight neighbours along an axis into an int32 word; order[i] lies at bit 4 * i."""
    eights = nibbles.movedim(axis, -1).unflatten(-1, (-1, 8)).long()
    packed = sum(eights[..., which] << 4 * bit for bit, which in enumerate(order))
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int().movedim(-1, axis).contiguous()


def pack(weight, config, generator, g_idx=None):
    """Returns ({kind: tensor}, the weight [N, K] that they stand for)."""
    n, k = weight.shape
    size = config["group_size"] if config["group_size"] > 0 else k
    groups = -(-k // size)
    nibbles_KN = torch.randint(0, 16, (k, n), generator=generator)
    zeros_GN = torch.randint(1, 16, (groups, n), generator=generator)
    scales_GN = (0.01 + 0.02 * torch.rand(groups, n, generator=generator)).half()
    group_of = torch.arange(k) // size if g_idx is None else g_idx
    stands_for = (nibbles_KN - zeros_GN[group_of]).double() * scales_GN[group_of].double()
    if config["quant_method"] == "awq":
        tensors = {"qweight": words(nibbles_KN, 1, AWQ_ORDER), "qzeros": words(zeros_GN, 1, AWQ_ORDER)}
    else:
        less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        tensors = {"qweight": words(nibbles_KN, 0), "qzeros": words(zeros_GN - less, 1)}
        tensors["g_idx"] = group_of.int()
    return {**tensors, "scales": scales_GN}, stands_for.T


def packed_checkpoint(config, quantization, g_idx=None):
    """Returns (tensors as stored, the plain checkpoint that they stand for)."""
    generator = torch.Generator().manual_seed(5)
    stored, plain = {}, {}
    for name, tensor in random_checkpoint(config).items():
        if "_proj.weight" in name:
            order = None if g_idx is None or tensor.shape[1] != len(g_idx) else g_idx
            kinds, plain[name] = pack(tensor, quantization, generator, order)
            stored |= {name.removesuffix("weight") + kind: part for kind, part in kinds.items()}
        else:
            stored[name] = plain[name] = tensor
    return stored, plain


def save(folder, tensors):
    safetensors_torch.save_file(tensors, folder / "model.safetensors")
    return folder


def load(source, config, quantization, **settings):
    spec = Architecture.from_hf(config | {"quantization_config": quantization})
    return load_weights(source, spec, torch.float32, "cpu", **settings)


def fused(plain, layer):
    """Assembles the four linear weights of a layer by hand."""
    of = {name.removeprefix(f"model.layers.{layer}."): weight for name, weight in plain.items()}
    return {
        "qkv": torch.cat([of[f"self_attn.{name}_proj.weight"] for name in "qkv"]),
        "o": of["self_attn.o_proj.weight"],
        "gate_up": torch.cat([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]]),
        "down": of["mlp.down_proj.weight"],
    }


@pytest.mark.parametrize(
    "quantization",
    [
        AWQ,
        AWQ | {"group_size": 64},
        GPTQ,
        GPTQ | {"group_size": -1},
        GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True},
    ],
    ids=["awq", "awq_g64", "gptq", "gptq_one_group", "gptq_v2"],
)
@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2"])
def test_packed_layers_are_what_they_stand_for(tmp_path, config, quantization):
    stored, plain = packed_checkpoint(config, quantization)
    weights = load(save(tmp_path, stored), config, quantization)
    for layer in range(2):
        for name, expected in fused(plain, layer).items():
            weight = weights[f"layers.{layer}.{name}.weight"]
            assert isinstance(weight, Int4Weight)
            torch.testing.assert_close(dense(weight), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(weights["embedding.weight"], plain["model.embed_tokens.weight"])


def test_inputs_quantised_in_another_order_are_computed_in_it(tmp_path):
    """GPTQ with desc_act: the groups' members lie anywhere."""
    quantization = GPTQ | {"desc_act": True}
    g_idx = (torch.arange(64) // 32)[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    stored, plain = packed_checkpoint(LLAMA, quantization, g_idx)
    weights = load(save(tmp_path, stored), LLAMA, quantization)
    down = weights["layers.1.down.weight"]
    assert down.order_K is not None
    torch.testing.assert_close(dense(down), fused(plain, 1)["down"], rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ValueError, match=r"down_proj\.qweight: inputs in another order.*use one rank|multiples"
    ):
        load(tmp_path, LLAMA, quantization, rank=0, world_size=2)


def test_projections_computed_together_must_have_one_order(tmp_path):
    config = LLAMA | {"hidden_size": 64, "head_dim": 16}
    quantization = GPTQ | {"desc_act": True}
    generator = torch.Generator().manual_seed(1)
    g_idx = (torch.arange(64) // 32)[torch.randperm(64, generator=generator)]
    stored, _ = packed_checkpoint(config, quantization, g_idx)
    load(save(tmp_path, stored), config, quantization)
    stored["model.layers.0.self_attn.k_proj.g_idx"] = g_idx.flip(0).int().contiguous()
    with pytest.raises(ValueError, match=r"k_proj\.g_idx.*must have the same order"):
        load(save(tmp_path, stored), config, quantization)


@pytest.mark.parametrize("quantization", [AWQ, GPTQ], ids=["awq", "gptq"])
def test_logits_of_a_packed_checkpoint_are_those_of_what_it_stands_for(tmp_path, quantization):
    stored, _ = packed_checkpoint(LLAMA, quantization)
    spec = Architecture.from_hf(LLAMA | {"quantization_config": quantization})
    weights = load(save(tmp_path, stored), LLAMA, quantization)
    decoder = Decoder(spec, weights, TORCH, 64)
    sequences = prompts(spec.vocab_size, lengths=(1, 9, 20))
    cache = KvCache(spec, 40, 4, torch.float32, torch.device("cpu"))
    for tokens, logits in zip(sequences, all_logits(decoder, cache, sequences), strict=True):
        expected = eager_logits(spec, weights, torch.tensor(tokens))
        torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("quantization", [AWQ, GPTQ], ids=["awq", "gptq"])
def test_ranks_hold_slices_of_the_packed_layers(tmp_path, quantization):
    config = LLAMA | {"hidden_size": 256, "intermediate_size": 512}  # heads of 64: 128 inputs of `o` a rank
    stored, _ = packed_checkpoint(config, quantization)
    save(tmp_path, stored)
    whole = load(tmp_path, config, quantization)
    ranks = [load(tmp_path, config, quantization, rank=rank, world_size=2) for rank in range(2)]

    def parts(name, axis=0):
        return [dense(rank[f"layers.1.{name}.weight"]) for rank in ranks]

    for name in ("o", "down"):
        assert torch.equal(torch.cat(parts(name), dim=1), dense(whole[f"layers.1.{name}.weight"]))
    for name, sizes in (("qkv", (128, 64, 64)), ("gate_up", (256, 256))):
        pieces = zip(*(part.split(sizes) for part in parts(name)), strict=True)
        together = torch.cat([torch.cat(of_ranks) for of_ranks in pieces])
        assert torch.equal(together, dense(whole[f"layers.1.{name}.weight"]))


def test_a_slice_that_cuts_a_block_is_refused_with_what_fits(tmp_path):
    stored, _ = packed_checkpoint(LLAMA, AWQ)
    with pytest.raises(
        ValueError, match=r"o_proj\.qweight: inputs 0 to 16 of 32.*multiples of 128; use fewer"
    ):
        load(save(tmp_path, stored), LLAMA, AWQ, rank=0, world_size=2)


def test_a_bias_of_zeros_is_no_bias_and_another_is_refused(tmp_path):
    stored, _ = packed_checkpoint(LLAMA, GPTQ)
    name = "model.layers.0.mlp.down_proj.bias"
    load(save(tmp_path, {**stored, name: torch.zeros(32)}), LLAMA, GPTQ)
    with pytest.raises(ValueError, match=rf"unknown to this architecture.*{name}"):
        load(save(tmp_path, {**stored, name: torch.ones(32)}), LLAMA, GPTQ)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "q_proj.qweight",
            torch.zeros(5, 32, dtype=torch.int32),
            r"q_proj\.qweight is \[5, 32\], must be \[4, 32\]",
        ),
        ("q_proj.scales", torch.zeros(2, 32).half(), r"q_proj\.scales is \[2, 32\], must be \[1, 32\]"),
        (
            "q_proj.scales",
            torch.full((1, 32), torch.nan).half(),
            "q_proj.*the scales contain infinite numbers or NaN",
        ),
        ("q_proj.qzeros", None, r"missing: model\.layers\.0\.self_attn\.q_proj\.qzeros"),
        ("q_proj.qweight", torch.zeros(4, 32), r"q_proj\.qweight is F32; supported: I32"),
        ("q_proj.weight", torch.zeros(32, 32), r"unknown to this architecture.*q_proj\.weight"),
        ("k_proj.g_idx", torch.ones(32, dtype=torch.int32), "k_proj.*g_idx: each group must have 32 inputs"),
    ],
)
def test_damaged_tensors_are_named(tmp_path, name, tensor, message):
    stored, _ = packed_checkpoint(LLAMA, GPTQ)
    stored.pop(full := f"model.layers.0.self_attn.{name}", None)
    if tensor is not None:
        stored[full] = tensor
    with pytest.raises(ValueError, match=message):
        load(save(tmp_path, stored), LLAMA, GPTQ)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "exl2"},
            r"quantization_config\.quant_method=.*exl2.*: supported: plain weights, fp8, awq, gptq",
        ),
        (AWQ | {"bits": 8}, r"quantization_config\.bits=8: must be 4"),
        (AWQ | {"group_size": 16}, r"quantization_config\.group_size=16: must be 32, 64, 128 or -1"),
        (AWQ | {"version": "gemv"}, r"quantization_config\.version=.*gemv.*: must be gemm"),
        (GPTQ | {"checkpoint_format": "marlin"}, r"checkpoint_format=.*marlin.*: must be gptq or gptq_v2"),
        ("awq", r"quantization_config\.quant_method=null"),
    ],
)
def test_formats_that_are_not_read_are_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        PackedFormat.from_config(config)


def test_plain_checkpoints_have_no_packed_format():
    assert PackedFormat.from_config(None) is None
    assert Architecture.from_hf(LLAMA).packed is None
