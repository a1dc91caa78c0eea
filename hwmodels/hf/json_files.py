"""Reads the JSON files of a checkpoint, within bounds, and the bytes of weights that they state.

These bytes are compared with those that a config.json gives. The size is that of the safetensors index beside
the file, or of the safetensors files themselves.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

from hwmodels.bounded_files import UnreadableFileError, read_text
from hwmodels.checks import is_whole
from hwmodels.model.model_spec import ModelSpec

MAX_JSON_BYTES = 1 << 28
"""Largest JSON file that is read; the index of a checkpoint with a million tensors has half of it."""


def load_json_object(file: Path) -> dict[str, Any]:
    """Reads a JSON object of at most MAX_JSON_BYTES; raises ValueError that names file, line and column."""
    try:
        config = json.loads(read_text(file, MAX_JSON_BYTES))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except UnreadableFileError as error:
        raise ValueError(f"{file}: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{file}: nests values too deeply to be read") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: must hold one JSON object, holds a {type(config).__name__}")
    return config


INDEX = "model.safetensors.index.json"
TOLERANCE = 0.03
"""Share by which the count may be off without a note: scales, positions and buffers that are not counted."""
HEADER_LENGTH = 8
"""Bytes of the length of the header, with which a safetensors file begins."""


class StoredSize(NamedTuple):
    """Bytes of a checkpoint's tensors, and the file or files that say so."""

    size: int
    source: str


def stored_size(folder: Path) -> StoredSize | None:
    """Returns the size of the checkpoint in a folder; None if neither index nor weights lie there.

    Raises ValueError for an index that is not JSON.
    """
    index = folder / INDEX
    if index.exists():
        metadata = load_json_object(index).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, int) and is_whole(total) and total > 0:
            return StoredSize(total, INDEX)
    files = sorted(folder.glob("model*.safetensors")) or [
        # Mistral's own files hold the same weights a second time.
        file
        for file in sorted(folder.glob("*.safetensors"))
        if not file.name.startswith("consolidated")
    ]
    sizes = [tensor_bytes(file) for file in files]
    if not sizes or None in sizes:
        return None
    name = files[0].name if len(files) == 1 else f"{len(files)} safetensors files"
    return StoredSize(sum(size for size in sizes if size is not None), name)


def tensor_bytes(file: Path) -> int | None:
    """Returns the bytes behind the header; None for other files, such as a pointer of Git LFS."""
    if not file.is_file():
        return None
    try:
        with file.open("rb") as opened:
            start = opened.read(HEADER_LENGTH)
        size = file.stat().st_size
    except OSError:
        return None
    if len(start) < HEADER_LENGTH:
        return None
    header: int = struct.unpack("<Q", start)[0]
    return size - HEADER_LENGTH - header if 0 < header <= size - HEADER_LENGTH else None


def size_notes(model: ModelSpec, folder: Path, *, is_float32: bool = False) -> tuple[str, ...]:
    """Returns one line with both sizes if the checkpoint's differs by more than TOLERANCE; else none.

    model: with the checkpoint's own number formats. Modules for multi-token prediction may be in the files or
    not. is_float32: the files hold 32 bits for what is served in 16, as those of float32 checkpoints do.
    """
    found = stored_size(folder)
    if found is None:
        return ()
    counted = model.weight_bytes_per_rank() * (2 if is_float32 and model.weights is None else 1)
    most = counted + mtp_bytes(model)
    if counted * (1 - TOLERANCE) <= found.size <= most * (1 + TOLERANCE):
        return ()
    nearest = counted if found.size < counted else most
    return (
        f"weights are counted as {nearest / 1e9:.4g} GB, but {found.size / 1e9:.4g} GB by {found.source} "
        f"({100 * (nearest / found.size - 1):+.3g} %): parts or formats of the checkpoint are not as counted",
    )


def mtp_bytes(model: ModelSpec) -> float:
    """Returns the most bytes of modules for multi-token prediction: a layer, a projection, two tables each.

    Quantisers often leave them in 16 bits.
    """
    layer = sum(matrix.elements for matrix in model.blocks[-1].layer_matrices(model.hidden_size))
    others = 2 * model.hidden_size**2 + 2 * model.embedding_elements
    return model.num_mtp_modules * (layer + others) * model.element_bytes
