"""Fused weights from three sources: equal to the checkpoint, sharded without loss, damaged files named."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="reads the package safetensors")

from realengine.model.architecture import Architecture  # noqa: E402
from realengine.weights.load import load_weights  # noqa: E402
from realengine.weights.table import expected, shard  # noqa: E402
from tests.realengine.checkpoints import (  # noqa: E402
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    as_gguf,
    gguf_metadata,
    random_checkpoint,
    write_gguf,
)

CONFIGS = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}
torch.set_num_threads(1)


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def save(folder, tensors, name="model.safetensors"):
    safetensors_torch.save_file(tensors, folder / name)
    return folder / name


def save_sharded(folder, tensors):
    """Saves tensors alternately in two files, with their index."""
    weight_map = {name: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save(folder, {name: tensors[name] for name in tensors if weight_map[name] == file}, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(source, config, dtype=torch.float32, **share):
    return load_weights(source, Architecture.from_hf(config), dtype, "cpu", **share)


def fused(config, checkpoint):
    """Assembles the engine's tensors by hand."""
    own = {
        "embedding.weight": checkpoint["model.embed_tokens.weight"],
        "norm.weight": checkpoint["model.norm.weight"],
    }
    own["head.weight"] = checkpoint.get("lm_head.weight", own["embedding.weight"])
    for i in range(config["num_hidden_layers"]):
        of = {
            name.removeprefix(f"model.layers.{i}."): tensor
            for name, tensor in checkpoint.items()
            if name.startswith(f"model.layers.{i}.")
        }
        layer = {
            "attention_norm.weight": of["input_layernorm.weight"],
            "mlp_norm.weight": of["post_attention_layernorm.weight"],
            "o.weight": of["self_attn.o_proj.weight"],
        }
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in of:
                layer[f"qkv.{kind}"] = torch.cat([of[f"self_attn.{name}_proj.{kind}"] for name in "qkv"])
        if "self_attn.q_norm.weight" in of:
            layer["q_norm.weight"] = of["self_attn.q_norm.weight"]
            layer["k_norm.weight"] = of["self_attn.k_norm.weight"]
        if "mlp.gate.weight" in of:
            experts = range(config["num_experts"])
            layer["router.weight"] = of["mlp.gate.weight"]
            layer["experts_gate_up.weight"] = torch.stack(
                [
                    torch.cat([of[f"mlp.experts.{e}.{name}_proj.weight"] for name in ("gate", "up")])
                    for e in experts
                ]
            )
            layer["experts_down.weight"] = torch.stack(
                [of[f"mlp.experts.{e}.down_proj.weight"] for e in experts]
            )
        else:
            layer["gate_up.weight"] = torch.cat([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]])
            layer["down.weight"] = of["mlp.down_proj.weight"]
        own.update({f"layers.{i}.{name}": tensor for name, tensor in layer.items()})
    return own


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_one_safetensors_file_is_fused_as_the_runner_wants_it(tmp_path, config):
    checkpoint = random_checkpoint(config)
    save(tmp_path, checkpoint)
    assert_same(load(tmp_path, config), fused(config, checkpoint))
    assert_same(load(tmp_path / "model.safetensors", config), fused(config, checkpoint))


def test_sharded_safetensors_are_read_by_their_index(tmp_path, config):
    checkpoint = random_checkpoint(config)
    save_sharded(tmp_path, checkpoint)
    assert_same(load(tmp_path, config), fused(config, checkpoint))


def test_gguf_gives_the_same_tensors_as_safetensors(tmp_path, config):
    checkpoint = random_checkpoint(config)
    file = write_gguf(tmp_path / "model.gguf", gguf_metadata(config), as_gguf(config, checkpoint))
    assert_same(load(file, config), fused(config, checkpoint))


def test_weights_are_converted_to_the_asked_dtype(tmp_path):
    checkpoint = {name: tensor.bfloat16() for name, tensor in random_checkpoint(LLAMA).items()}
    save(tmp_path, checkpoint)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = load(tmp_path, LLAMA, dtype)
        assert_same(found, {name: tensor.to(dtype) for name, tensor in fused(LLAMA, checkpoint).items()})
        assert {tensor.dtype for tensor in found.values()} == {dtype}


def test_a_tied_head_is_the_embedding_itself(tmp_path):
    save(tmp_path, random_checkpoint(QWEN2))
    weights = load(tmp_path, QWEN2)
    assert weights["head.weight"] is weights["embedding.weight"]
    head = load(tmp_path, QWEN2, rank=1, world_size=2)["head.weight"]
    assert torch.equal(head, weights["head.weight"][20:])


def test_random_weights_have_the_shapes_of_a_checkpoint(tmp_path, config):
    wanted = fused(config, random_checkpoint(config))
    found = load(None, config)
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in wanted.items()}


def test_random_weights_are_normal_norms_are_ones_and_seeds_differ():
    config = {**LLAMA, "vocab_size": 4000}
    weights, again, other = load(None, config, seed=1), load(None, config, seed=1), load(None, config, seed=2)
    assert_same(weights, again)
    assert not torch.equal(weights["embedding.weight"], other["embedding.weight"])
    assert not torch.equal(weights["layers.0.o.weight"], weights["layers.1.o.weight"])
    assert torch.equal(weights["layers.1.mlp_norm.weight"], torch.ones(32))
    table = weights["embedding.weight"]  # 128,000 numbers: standard errors 5.6e-5 and 4e-5
    assert abs(table.mean()) < 3e-4
    assert abs(table.std() - 0.02) < 3e-4


@pytest.mark.parametrize("source", ["safetensors", "gguf", "random"])
def test_tensor_parallel_ranks_compute_what_one_device_does(tmp_path, config, source):
    """An MLP and the projections of attention, by hand: rank outputs concatenate or add up to the whole's."""
    where = None
    if source == "safetensors":
        save(where := tmp_path, random_checkpoint(config))
    elif source == "gguf":
        where = tmp_path / "model.gguf"
        write_gguf(where, gguf_metadata(config), as_gguf(config, random_checkpoint(config)))
    architecture = Architecture.from_hf(config)
    whole = load(where, config)
    ranks = [load(where, config, rank=rank, world_size=2) for rank in range(2)]
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))

    def qkv(weights, num_ranks):
        y = x @ weights["layers.1.qkv.weight"].T + weights.get("layers.1.qkv.bias", torch.zeros(()))
        sizes = [n * architecture.head_dim // num_ranks for n in (4, 2, 2)]
        return y.split(sizes, dim=1)

    for part in range(3):
        together = torch.cat([qkv(rank, 2)[part] for rank in ranks], dim=1)
        torch.testing.assert_close(together, qkv(whole, 1)[part])
    attended = torch.randn(5, 4 * architecture.head_dim, generator=torch.Generator().manual_seed(2))
    halves = attended.chunk(2, dim=1)
    added = sum(half @ rank["layers.1.o.weight"].T for half, rank in zip(halves, ranks, strict=True))
    torch.testing.assert_close(added, attended @ whole["layers.1.o.weight"].T)

    def mlp(weights):
        if "layers.1.gate_up.weight" in weights:
            up, down = weights["layers.1.gate_up.weight"][None], weights["layers.1.down.weight"][None]
        else:
            up, down = weights["layers.1.experts_gate_up.weight"], weights["layers.1.experts_down.weight"]
        gate, value = (x @ up.mT).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * value) @ down.mT

    torch.testing.assert_close(sum(mlp(rank) for rank in ranks), mlp(whole), rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat([rank["head.weight"] for rank in ranks]), whole["head.weight"])


@pytest.mark.parametrize(
    ("fields", "world_size", "message"),
    [
        ({}, 4, "num_kv_heads=2: cannot be divided among world_size=4 ranks.*: 1, 2$"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}, 2, "num_heads=3"),
        ({"intermediate_size": 65}, 2, "intermediate_size=65"),
        ({"vocab_size": 41}, 2, "vocab_size=41"),
        ({"vocab_size": 41, "tie_word_embeddings": True}, 2, "vocab_size=41"),
    ],
)
def test_rejects_a_world_size_that_divides_not_everything(fields, world_size, message):
    with pytest.raises(ValueError, match=message):
        load(None, {**LLAMA, **fields}, rank=0, world_size=world_size)


def test_rejects_a_rank_outside_the_world():
    with pytest.raises(ValueError, match="rank=2"):
        shard(expected(Architecture.from_hf(LLAMA)), rank=2, world_size=2)


def test_rejects_missing_tensors_by_name(tmp_path):
    checkpoint = random_checkpoint(LLAMA)
    del checkpoint["model.layers.1.mlp.up_proj.weight"]
    save(tmp_path, checkpoint)
    with pytest.raises(ValueError, match=rf"{tmp_path}.*missing: model\.layers\.1\.mlp\.up_proj\.weight$"):
        load(tmp_path, LLAMA)


def test_rejects_a_wrong_shape_with_both_shapes(tmp_path):
    checkpoint = random_checkpoint(LLAMA)
    checkpoint["model.layers.1.mlp.up_proj.weight"] = torch.zeros(63, 32)
    save_sharded(tmp_path, checkpoint)
    message = (
        r"-of-00002\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight is \[63, 32\], must be \[64, 32\]"
    )
    with pytest.raises(ValueError, match=message):
        load(tmp_path, LLAMA)


def test_tolerates_only_extra_tensors_that_are_known(tmp_path):
    checkpoint = random_checkpoint(QWEN2)
    known = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "lm_head.weight": torch.zeros(40, 32),
    }
    save(tmp_path, {**checkpoint, **known})
    assert_same(load(tmp_path, QWEN2), fused(QWEN2, checkpoint))
    save(tmp_path, {**checkpoint, "model.layers.2.self_attn.o_proj.weight": torch.zeros(2)})
    with pytest.raises(
        ValueError, match=r"model\.safetensors: unknown to this .*model\.layers\.2\.self_attn\.o_proj"
    ):
        load(tmp_path, QWEN2)


def test_rejects_a_truncated_file_and_names_the_first_tensor_cut(tmp_path):
    checkpoint = random_checkpoint(LLAMA)
    file = save(tmp_path, checkpoint)
    whole = file.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    last = max((name for name in checkpoint), key=lambda name: header[name]["data_offsets"][1])
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"{file}: truncated: {last} ends at byte {len(whole)}"):
        load(tmp_path, LLAMA)
    for cut in (0, 5, 100):
        file.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=rf"{file}: truncated"):
            load(tmp_path, LLAMA)


def test_rejects_numbers_that_are_none(tmp_path):
    checkpoint = random_checkpoint(LLAMA)
    checkpoint["model.layers.0.self_attn.k_proj.weight"][3, 5] = float("nan")
    save(tmp_path, checkpoint)
    with pytest.raises(
        ValueError, match=r"model\.layers\.0\.self_attn\.k_proj\.weight: contains infinite numbers or NaN"
    ):
        load(tmp_path, LLAMA)


def test_rejects_an_overflow_of_fp16(tmp_path):
    checkpoint = random_checkpoint(LLAMA)
    checkpoint["lm_head.weight"][0, 0] = 1e6
    save(tmp_path, checkpoint)
    with pytest.raises(ValueError, match=r"lm_head\.weight: contains infinite.*float16"):
        load(tmp_path, LLAMA, torch.float16)
    load(tmp_path, LLAMA, torch.bfloat16)


def test_rejects_quantised_tensors(tmp_path):
    checkpoint = random_checkpoint(LLAMA)
    name = "model.layers.0.self_attn.k_proj.weight"
    save(tmp_path, {**checkpoint, name: checkpoint[name].to(torch.float8_e5m2)})
    with pytest.raises(ValueError, match=rf"{name} is F8_E5M2; supported: F32, F16, BF16"):
        load(tmp_path, LLAMA)


def test_rejects_an_index_that_names_what_is_not_there(tmp_path):
    save_sharded(tmp_path, random_checkpoint(LLAMA))
    index = tmp_path / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"]["model.norm.weight"] = "model-00003-of-00003.safetensors"
    index.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"model-00003-of-00003\.safetensors: no such file"):
        load(tmp_path, LLAMA)
    wrong = next(file for file in fields["weight_map"].values() if "00003" not in file)
    fields["weight_map"]["model.norm.weight"] = wrong
    fields["weight_map"]["lm_head.weight"] = wrong
    fields["weight_map"]["ghost.weight"] = wrong
    index.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=rf"{wrong}: .*: missing in the file"):
        load(tmp_path, LLAMA)


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 7, None, ["a"]]
)
def test_rejects_an_index_that_names_files_elsewhere(tmp_path, file):
    save_sharded(tmp_path, random_checkpoint(LLAMA))
    index = tmp_path / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(fields))
    with pytest.raises(
        ValueError, match=r"weight_map: model\.norm\.weight=.*: must be the name of a file in the same"
    ):
        load(tmp_path, LLAMA)


def test_rejects_places_without_weights(tmp_path):
    with pytest.raises(ValueError, match="contains no safetensors file"):
        load(tmp_path, LLAMA)
    with pytest.raises(ValueError, match="no such file or folder"):
        load(tmp_path / "nowhere", LLAMA)
    with pytest.raises(ValueError, match=r"dtype=torch\.int8"):
        load(None, LLAMA, torch.int8)
