"""GGUF files (versions 2 and 3, little endian): metadata and tensors, memory-mapped, dequantised on reading.

    | "GGUF" version | counts of tensors, keys | keys, values | names, dims, types, offsets | pad | data |

Dimensions are stored innermost first, tensors row by row in blocks.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hwmodels.checks import UnreadableFileError, open_regular

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def _q4_0(blocks: Bytes) -> Floats:
    """Dequantises d, 16 bytes of nibbles: d (q - 8)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    """Dequantises d, m, 16 bytes of nibbles: d q + m."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    """Dequantises d, 4 bytes of fifth bits, 16 bytes of nibbles: d (q - 16)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 6:]) + 16 * _bits(blocks[:, 2:6]) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    """Dequantises d, m, 4 bytes of fifth bits, 16 bytes of nibbles: d q + m."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) + 16 * _bits(blocks[:, 4:8])) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    """Dequantises d, 32 int8: d q."""
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    """Dequantises d, m, 12 bytes of 6-bit scales and minima of 8 runs, 128 bytes of nibbles: d s q - m n."""
    return _with_scales(blocks, _nibbles_by_32(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Floats:
    """Dequantises Q4_K's layout with 32 bytes of fifth bits before the nibbles.

    Bit j of byte l belongs to weight l of run j.
    """
    high = (blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8)) & 1  # [blocks, l, j]
    return _with_scales(
        blocks, _nibbles_by_32(blocks[:, 48:]) + 16 * high.transpose(0, 2, 1).astype(np.float32)
    )


def _q6_k(blocks: Bytes) -> Floats:
    """Dequantises 128 bytes of nibbles, 64 of upper bit pairs, 16 int8 scales of 16 weights, d: d s (q - 32).

    Each half of a block has 4 runs of 32 weights: low nibbles of 64 bytes, then their high nibbles; run j's
    upper bits are pair j of the half's 32 bytes.
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    q = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - np.float32(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[:, :, None] * q).reshape(-1, 256)


class BlockFormat(NamedTuple):
    """Name, weights and bytes of a block, and its dequantisation (None: plain floats).

    Block formats of ggml: weights and bytes per block, and the dequantisation of its bytes.

    A block is 32 weights (256 in the K formats) with their own scales. Each function takes uint8 [blocks,
    bytes] and returns fp32 [blocks, weights]. d: scale, m: minimum, both fp16; q: the stored number; low
    nibbles come first.
    """

    name: str
    num_weights: int
    num_bytes: int
    dequantise: Callable[[Bytes], Floats] | None


FORMATS = {
    0: BlockFormat("F32", 1, 4, None),
    1: BlockFormat("F16", 1, 2, None),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, None),
}
"""Block formats by their numbers in GGUF files."""

UNSUPPORTED = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Names of unsupported formats, for the error message."""


def _half(blocks: Bytes, start: int) -> Floats:
    """Returns the fp16 at byte `start` of each block as fp32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """Unpacks [blocks, n] to [blocks, 2 n]: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _nibbles_by_32(packed: Bytes) -> Floats:
    """Unpacks [blocks, 128] to [blocks, 8, 32]: of each 32 bytes the low nibbles, then the high ones."""
    return _nibbles(packed.reshape(-1, 32)).reshape(-1, 8, 32)


def _bits(packed: Bytes) -> Floats:
    """Unpacks [blocks, n] to [blocks, 8 n], lowest bit first."""
    return np.unpackbits(packed, axis=1, bitorder="little").astype(np.float32)


def _with_scales(blocks: Bytes, q: Floats) -> Floats:
    """Computes d s q - m n for q [blocks, 8, 32]; scales s and minima n are 6 bits each, in bytes 4 to 15.

    Of those 12 bytes, 0-3 hold s of runs 0-3 and 4-7 their n; 8-11 hold the low four bits of runs 4-7 (s low,
    n high), whose upper two bits are the top bits of bytes 0-3 (s) and 4-7 (n).
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1).astype(np.float32)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1).astype(np.float32)
    d, m = _half(blocks, 0) * scales, _half(blocks, 2) * minima  # [blocks, 8]
    return (d[:, :, None] * q - m[:, :, None]).reshape(-1, 256)


VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_DEPTH = 4
"""Deepest array of arrays in the metadata; files of llama.cpp have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """Position of a tensor: shape with the outermost dimension first, start in bytes of the file."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    start: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.format.num_weights * self.format.num_bytes


class GgufFile:
    """One file. Raises ValueError with the file and the tensor if it is not a complete GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
        except UnreadableFileError as error:
            raise ValueError(f"{path}: {error}") from None
        except ValueError:
            raise ValueError(f"{path}: empty") from None
        self.metadata: dict[str, Any] = {}
        """Values by key; an array is a list."""
        self.tensors: dict[str, GgufTensor] = {}
        self._at = 0
        self._read_header()

    def read(self, name: str, take: Sequence[slice] = ()) -> torch.Tensor:
        """Reads a tensor, or the part `take` of it: F32, F16 and BF16 as stored, all other types as fp32."""
        tensor = self.tensors[name]
        first, *others = take or [slice(None)]
        start, stop, _ = first.indices(tensor.shape[0])
        row_bytes = tensor.num_bytes // tensor.shape[0]  # bytes per index of the outermost dimension
        count = (stop - start) * row_bytes
        data = np.frombuffer(self._bytes, np.uint8, count=count, offset=tensor.start + start * row_bytes)
        whole = _numbers(data, tensor.format).reshape(stop - start, *tensor.shape[1:])
        return whole[(slice(None), *others)]

    def _read_header(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise ValueError(f"{self.path}: not a GGUF file: starts with {self._bytes[:4]!r}")
        self._at = 4
        (version,) = self._unpack("I", "the version")
        if version not in VERSIONS:
            raise ValueError(f"{self.path}: GGUF version {version}: supported: 2 and 3, little endian")
        num_tensors, num_keys = self._unpack("QQ", "the counts")
        for number in range(num_keys):
            key = self._string(f"key {number} of {num_keys}")
            (kind,) = self._unpack("I", f"the type of {key}")
            self.metadata[key] = self._value(kind, key)
        described = [self._tensor(f"tensor {number} of {num_tensors}") for number in range(num_tensors)]
        self._place(described)

    def _place(self, described: list[tuple[str, tuple[int, ...], BlockFormat, int]]) -> None:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{self.path}: general.alignment={alignment}: must be a whole number >= 1")
        data = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in described:
            tensor = GgufTensor(name=name, shape=shape, format=kind, start=data + offset)
            if tensor.start + tensor.num_bytes > len(self._bytes):
                raise ValueError(
                    f"{self.path}: truncated: {name} {list(shape)} {kind.name} ends at byte "
                    f"{tensor.start + tensor.num_bytes}, the file at {len(self._bytes)}"
                )
            if name in self.tensors:
                raise ValueError(f"{self.path}: {name}: the tensor occurs twice")
            self.tensors[name] = tensor

    def _tensor(self, what: str) -> tuple[str, tuple[int, ...], BlockFormat, int]:
        name = self._string(what)
        (num_dimensions,) = self._unpack("I", name)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(
                f"{self.path}: {name}: {num_dimensions} dimensions, must be 1 to {MAX_DIMENSIONS}"
            )
        shape = tuple(reversed(self._unpack(f"{num_dimensions}Q", name)))
        kind, offset = self._unpack("IQ", name)
        if kind not in FORMATS:
            known, stored = ", ".join(known.name for known in FORMATS.values()), UNSUPPORTED.get(kind, kind)
            raise ValueError(f"{self.path}: {name}: type {stored} is not supported, only {known}")
        if 0 in shape or shape[-1] % FORMATS[kind].num_weights:
            block = FORMATS[kind]
            raise ValueError(
                f"{self.path}: {name} {list(shape)}: rows must be whole blocks of {block.num_weights} "
                f"weights ({block.name})"
            )
        return name, shape, FORMATS[kind], offset

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self._string(key)
        if kind == ARRAY:
            if depth == MAX_DEPTH:
                raise ValueError(f"{self.path}: {key}: nests arrays deeper than {MAX_DEPTH} levels")
            element, count = self._unpack("IQ", key)
            if element in SCALARS:
                return list(self._unpack(f"{count}{SCALARS[element]}", key))
            return [self._value(element, key, depth + 1) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"{self.path}: {key}: value type {kind} is unknown")
        return self._unpack(SCALARS[kind], key)[0]

    def _string(self, what: str) -> str:
        (length,) = self._unpack("Q", what)
        text = self._bytes[self._at : self._at + length]
        if len(text) < length:
            raise self._truncated(what)
        self._at += length
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{self.path}: {what}: not UTF-8 at byte {self._at - length}") from None

    def _unpack(self, layout: str, what: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from(f"<{layout}", self._bytes, self._at)
            self._at += struct.calcsize(f"<{layout}")
        except (struct.error, OverflowError, MemoryError):
            raise self._truncated(what) from None
        return values

    def _truncated(self, what: str) -> ValueError:
        return ValueError(
            f"{self.path}: truncated: {what} at byte {self._at} goes past the end, byte {len(self._bytes)}"
        )


def _numbers(data: np.ndarray[Any, np.dtype[np.uint8]], kind: BlockFormat) -> torch.Tensor:
    """Returns the weights of whole blocks, in a new tensor."""
    if kind.dequantise is not None:
        return torch.from_numpy(kind.dequantise(data.reshape(-1, kind.num_bytes)).reshape(-1))
    floats = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return torch.from_numpy(data.copy()).view(floats[kind.name])
