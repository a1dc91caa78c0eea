"""Weights from a checkpoint, or random: checked against the architecture, fused, on the device.

Nothing is converted before every tensor is known to be there with the right shape, and no weight is held
twice: each checkpoint tensor is read, memory-mapped, straight into its place.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from realengine.architecture import Architecture
from realengine.weights.gguf import GgufFile
from realengine.weights.random import random_weights
from realengine.weights.safetensors import SafetensorsCheckpoint
from realengine.weights.table import GGUF, HUGGING_FACE, Part, Weight, expected, shard

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# In some checkpoints and computed from the configuration here; the head only where it is tied.
COMPUTED = re.compile(r".*rotary_emb\.inv_freq|.*\.masked_bias|rope_freqs\.weight")
SHOWN = 5  # names in one error


class Checkpoint(Protocol):
    """What a file format gives: shapes by name, and parts of tensors on the CPU."""

    shapes: dict[str, tuple[int, ...]]

    def where(self, name: str) -> Path: ...

    def read(self, name: str, take: Sequence[slice]) -> torch.Tensor: ...


class _GgufCheckpoint:
    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.shapes = {name: tensor.shape for name, tensor in file.tensors.items()}

    def where(self, name: str) -> Path:
        return self.file.path

    def read(self, name: str, take: Sequence[slice]) -> torch.Tensor:
        return self.file.read(name, take)


def load_weights(
    source: Path | str | GgufFile | None,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Every weight by its own name (`realengine.weights.table`), and head.weight, tied or not.

    source: a safetensors file or folder, a .gguf file (or one already open), or None: random, drawn with the
    seed. rank, world_size: this tensor parallel rank's share. Raises ValueError, naming file and tensor, on
    missing, misshapen, truncated, non-finite and unknown tensors, and where world_size does not divide a
    number of the architecture.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: weights are float32, float16 or bfloat16")
    device = torch.device(device)
    if source is None:
        tensors = random_weights(architecture, dtype, device, seed=seed, rank=rank, world_size=world_size)
    else:
        checkpoint, names = _open(source)
        weights = expected(architecture, names)
        _check(weights, checkpoint, ignored=[names["head"]] if architecture.tie_word_embeddings else [])
        shares = shard(weights, rank, world_size)
        tensors = {weight.name: _assemble(weight, checkpoint, dtype, device) for weight in shares}
    if architecture.tie_word_embeddings:
        embedding = tensors["embedding.weight"]
        rows = architecture.vocab_size // world_size
        tensors["head.weight"] = embedding if world_size == 1 else embedding[rank * rows : (rank + 1) * rows]
    return tensors


def _open(source: Path | str | GgufFile) -> tuple[Checkpoint, Mapping[str, str]]:
    if isinstance(source, GgufFile):
        return _GgufCheckpoint(source), GGUF
    path = Path(source)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if path.suffix == ".gguf":
        return _GgufCheckpoint(GgufFile(path)), GGUF
    return SafetensorsCheckpoint(path), HUGGING_FACE


def _check(weights: Sequence[Weight], checkpoint: Checkpoint, ignored: Collection[str]) -> None:
    """Missing and misshapen tensors, and those that nothing here computes with."""
    parts = [part for weight in weights for part in weight.parts]
    if missing := [part.name for part in parts if part.name not in checkpoint.shapes]:
        raise ValueError(f"{checkpoint.where(missing[0])}: missing: {_some(missing)}")
    for part in parts:
        if (found := checkpoint.shapes[part.name]) != part.shape:
            raise ValueError(
                f"{checkpoint.where(part.name)}: {part.name} is {list(found)}, must be {list(part.shape)}"
            )
    known = {part.name for part in parts}.union(ignored)
    extra = [name for name in checkpoint.shapes if name not in known and not COMPUTED.fullmatch(name)]
    if extra:
        raise ValueError(
            f"{checkpoint.where(extra[0])}: not of this architecture, answers would be wrong: {_some(extra)}"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _assemble(
    weight: Weight, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    own = torch.empty(weight.shape, dtype=dtype, device=device)
    for part in weight.parts:
        own[part.into].copy_(_halves(checkpoint.read(part.name, part.take), part))
    if not own.isfinite().all():
        bad = next((part.name for part in weight.parts if not own[part.into].isfinite().all()), weight.name)
        file = checkpoint.where(weight.parts[0].name)
        raise ValueError(f"{file}: {bad}: infinite or not a number in {dtype}")
    return own


def _halves(stored: torch.Tensor, part: Part) -> torch.Tensor:
    """Rows of each head from the order 0, D/2, 1, D/2 + 1, ... to 0, 1, 2, ...: rotary pairs i, i + D/2."""
    if part.interleaved_head_dim is None:
        return stored
    pairs = stored.reshape(-1, part.interleaved_head_dim // 2, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape)
