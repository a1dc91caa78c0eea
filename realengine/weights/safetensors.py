"""Safetensors checkpoints in Hugging Face's layout, read lazily: a file, or a folder with one or an index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hwmodels.hf.fields import load_json_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F32", "F16", "BF16")
FP8 = "F8_E4M3"
INTEGERS = ("I32", "I64", "U8")


class SafetensorsCheckpoint:
    """Tensors by name, over all files. Raises ValueError with file and tensor if a tensor is incomplete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handles: dict[Path, Any] = {}
        self._files: dict[str, Path] = {}
        listed = _listed(path)
        for file in dict.fromkeys(listed.values()) if listed else [_only_file(path)]:
            self._handles[file] = handle = _open(file)
            self._files.update(dict.fromkeys(handle.keys(), file))
        for name, file in listed.items():
            if self._files.get(name) != file:
                raise ValueError(f"{file}: {name}: missing in the file that {INDEX} names")
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, file in self._files.items():
            self.shapes[name] = tuple(self._handles[file].get_slice(name).get_shape())

    def where(self, name: str) -> Path:
        """Returns the file that holds, or should hold, a tensor."""
        return self._files.get(name, self.path)

    def read(self, name: str, take: Sequence[slice], *, integers: bool = False) -> torch.Tensor:
        """Reads the part `take` of a tensor, as stored. integers: words of packed weights, not floats."""
        stored = self._handles[self._files[name]].get_slice(name)
        dtypes = INTEGERS if integers else FLOATS
        if stored.get_dtype() not in dtypes:
            raise ValueError(
                f"{self.where(name)}: {name} is {stored.get_dtype()}; supported: {', '.join(dtypes)} (4-bit "
                "weights of AWQ and GPTQ with their quantization_config)"
            )
        part: torch.Tensor = stored[tuple(take)]
        return part

    def is_fp8(self, name: str) -> bool:
        """Returns whether a tensor is stored in FP8 (e4m3)."""
        return bool(self._handles[self._files[name]].get_slice(name).get_dtype() == FP8)

    def read_fp8(self, name: str, take: Sequence[slice]) -> torch.Tensor:
        """Reads the part `take` of an FP8 tensor, as stored."""
        part: torch.Tensor = self._handles[self._files[name]].get_slice(name)[tuple(take)]
        return part


def _listed(path: Path) -> Mapping[str, Path]:
    """Returns files by tensor according to the index; empty if there is none."""
    index = path / INDEX
    if not index.is_file():
        return {}
    weight_map = load_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map: missing or empty")
    return {name: _beside(index, name, file) for name, file in weight_map.items()}


def _beside(index: Path, name: str, file: Any) -> Path:
    """Returns a file that the index names; ValueError unless it lies in the folder of the index."""
    if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
        raise ValueError(f"{index}: weight_map: {name}={file}: must be the name of a file in the same folder")
    return index.parent / file


def _only_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.safetensors"))
    if path / SINGLE in found:
        return path / SINGLE
    if len(found) != 1:
        holds = ", ".join(file.name for file in found) or "no safetensors file"
        raise ValueError(f"{path}: must contain {INDEX}, {SINGLE} or one safetensors file; contains {holds}")
    return found[0]


def _open(file: Path) -> Any:
    try:
        package: Any = import_module("safetensors")
    except ImportError:
        raise ImportError(
            f"{file}: needs the package safetensors: pip install 'windtunnel[engine]'"
        ) from None
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    try:
        return package.safe_open(file, framework="pt", device="cpu")
    except package.SafetensorError as error:
        raise ValueError(f"{file}: {_damage(file) or error}") from None


def _damage(file: Path) -> str | None:
    """Returns a sentence on the tensor in which a truncated file ends; None if the file is complete.

    A file: length of the header (8 bytes), header (JSON), data.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = 8 + int.from_bytes(opened.read(8), "little")
        if start > size:
            return f"truncated, or not a safetensors file: header of {start - 8} bytes in a file of {size}"
        try:
            header = json.loads(opened.read(start - 8))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            ends = {name: start + entry["data_offsets"][1] for name, entry in tensors.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if end > size:
            return f"truncated: {name} ends at byte {end}, the file at {size}"
    return None
