"""GGUF: header, block formats against worked numbers and against the package gguf, damaged files."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from realengine.model.architecture import Architecture  # noqa: E402
from realengine.serving.tokenizer import find_smollm2  # noqa: E402
from realengine.weights.gguf import (  # noqa: E402
    FORMATS,
    GgufFile,
)
from realengine.weights.load import load_weights  # noqa: E402
from tests.realengine.checkpoints import LLAMA, as_gguf, gguf_metadata, random_checkpoint, write_gguf  # noqa: E402

torch.set_num_threads(1)
Q4_0, Q4_1, Q8_0 = 2, 3, 8
NIBBLES = bytes(low | (15 - low) << 4 for low in range(16))  # 0 .. 15, then 15 .. 0
STORED = np.concatenate([np.arange(16), np.arange(15, -1, -1)])


def half(value):
    return struct.pack("<e", value)


def read_one(tmp_path, kind, shape, raw, take=()):
    return GgufFile(write_gguf(tmp_path / "one.gguf", {}, {"x": (kind, shape, raw)})).read("x", take)


@pytest.mark.parametrize(
    ("kind", "block", "weights"),
    [
        (Q4_0, half(0.5) + NIBBLES, 0.5 * (STORED - 8)),
        (Q4_1, half(0.25) + half(-3.0) + NIBBLES, 0.25 * STORED - 3),
        (Q8_0, half(2.0) + bytes(range(112, 144)), 2.0 * np.r_[112:128, -128:-112]),
    ],
    ids=["Q4_0", "Q4_1", "Q8_0"],
)
def test_blocks_hold_worked_numbers(tmp_path, kind, block, weights):
    found = read_one(tmp_path, kind, (2, 32), block + bytes(len(block)))
    assert found[0].tolist() == weights.tolist()
    assert not found[1].any()


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_every_format_equals_the_package_gguf(tmp_path, kind):
    gguf = pytest.importorskip("gguf", reason="compares with the package gguf")
    block = FORMATS[kind]
    rows, columns = 6, max(block.num_weights * 2, 8)
    num_blocks = rows * columns // block.num_weights
    raw = np.random.default_rng(kind).integers(0, 256, (num_blocks, block.num_bytes), dtype=np.uint8)
    for at in {2: [0], 3: [0, 2], 6: [0], 7: [0, 2], 8: [0], 12: [0, 2], 13: [0, 2], 14: [208]}.get(kind, []):
        raw[:, at + 1] = raw[:, at + 1] & 0x83 | 0x30  # scales that are finite
    if kind in (0, 1, 30):  # no infinities
        floats = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
        raw = (
            floats.view(np.uint8) if kind == 0
            else floats.astype(np.float16).view(np.uint8) if kind == 1
            else np.ascontiguousarray(floats.view(np.uint16)[:, 1::2]).view(np.uint8)
        )  # fmt: skip
    found = read_one(tmp_path, kind, (rows, columns), raw.tobytes())
    wanted = gguf.quants.dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType(kind))
    assert gguf.GGMLQuantizationType(kind).name == block.name
    assert found.isfinite().all()
    assert found.float().std() > 0
    assert found.float().tolist() == wanted.astype(np.float32).reshape(rows, columns).tolist()


def test_a_part_is_what_slicing_the_whole_gives(tmp_path):
    raw = b"".join(
        half(0.1 * i) + bytes(np.random.default_rng(i).integers(0, 256, 32, dtype=np.uint8))
        for i in range(24)
    )
    whole = read_one(tmp_path, Q8_0, (3, 4, 64), raw)
    part = read_one(tmp_path, Q8_0, (3, 4, 64), raw, (slice(1, 3), slice(0, 2), slice(5, 40)))
    assert torch.equal(part, whole[1:3, 0:2, 5:40])


def test_metadata_of_every_kind(tmp_path):
    metadata = {"a": 7, "b": True, "c": 0.5, "d": "wörd", "e": [1, -2], "f": ["x", "yé"]}
    for version in (2, 3):
        assert GgufFile(write_gguf(tmp_path / "m.gguf", metadata, {}, version=version)).metadata == metadata


def test_tensors_begin_where_the_alignment_says(tmp_path):
    file = write_gguf(
        tmp_path / "m.gguf", {}, {"x": np.arange(3, dtype=np.float32), "y": np.ones((2, 2), np.float32)}
    )
    opened = GgufFile(file)
    assert opened.read("x").tolist() == [0, 1, 2]
    assert opened.read("y").tolist() == [[1, 1], [1, 1]]


def test_every_truncation_is_noticed_and_says_where(tmp_path):
    metadata = {"general.name": "small", "list": ["a", "b"], "numbers": [1, 2, 3]}
    file = write_gguf(tmp_path / "m.gguf", metadata, {"x": np.arange(8, dtype=np.float32)})
    whole = file.read_bytes()
    for cut in range(4, len(whole)):
        file.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=f"{re.escape(str(file))}: truncated"):
            GgufFile(file)
    file.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError, match=rf"truncated: x \[8\] F32 ends at byte {len(whole)}, .* {len(whole) - 1}"
    ):
        GgufFile(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04....", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1: supported: 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little endian"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60), "truncated: key 0 of 1"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "k: value type 99"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**61),
            "truncated: k",
        ),
        (
            b"GGUF"
            + struct.pack("<IQQQ", 3, 0, 1, 1)
            + b"k"
            + struct.pack("<I", 9)
            + struct.pack("<IQ", 9, 1) * 100_000,
            "k: nests arrays deeper than 4 levels",
        ),
    ],
)
def test_rejects_what_is_no_gguf_file(tmp_path, content, message):
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}: {message}|{message}"):
        GgufFile(file)
    with pytest.raises(ValueError, match="cannot be read"):
        GgufFile(tmp_path / "none.gguf")


def test_rejects_formats_and_shapes_that_are_not_read(tmp_path):
    with pytest.raises(ValueError, match="x: type IQ2_XXS is not supported, only F32, F16, Q4_0"):
        read_one(tmp_path, 16, (2, 256), bytes(200))
    with pytest.raises(ValueError, match=r"x \[2, 40\]: rows must be whole blocks of 32 weights \(Q8_0\)"):
        read_one(tmp_path, Q8_0, (2, 40), bytes(200))


def test_rejects_a_wrong_shape_with_both_shapes(tmp_path):
    tensors = as_gguf(LLAMA, random_checkpoint(LLAMA))
    tensors["blk.1.ffn_up.weight"] = np.zeros((63, 32), np.float32)
    file = write_gguf(tmp_path / "m.gguf", gguf_metadata(LLAMA), tensors)
    with pytest.raises(
        ValueError, match=r"m\.gguf: blk\.1\.ffn_up\.weight is \[63, 32\], must be \[64, 32\]"
    ):
        load_weights(file, Architecture.from_path(file), torch.float32, "cpu")


def test_smollm2_equals_the_package_gguf():
    gguf = pytest.importorskip("gguf", reason="compares with the package gguf")
    try:
        path = find_smollm2()
    except ImportError as error:
        pytest.skip(str(error))
    file = GgufFile(path)
    assert Architecture.from_gguf(file) == Architecture(
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    reader = gguf.GGUFReader(path)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    assert theirs.keys() == file.tensors.keys()
    for name in ("token_embd.weight", "blk.7.ffn_down.weight", "blk.29.attn_q.weight", "output_norm.weight"):
        wanted = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
        assert np.array_equal(file.read(name).numpy(), wanted), name
    assert file.metadata["tokenizer.ggml.tokens"] == reader.fields["tokenizer.ggml.tokens"].contents()
