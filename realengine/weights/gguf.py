"""GGUF files (versions 2 and 3, little endian): metadata and tensors, memory-mapped, dequantised on reading.

    | "GGUF" version | counts of tensors, keys | keys, values | names, dims, types, offsets | pad | data |

Dimensions are stored innermost first, tensors row by row in blocks (`realengine.weights.blocks`).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hwmodels.checks import UnreadableFileError, open_regular
from realengine.weights.blocks import FORMATS, UNSUPPORTED, BlockFormat

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
