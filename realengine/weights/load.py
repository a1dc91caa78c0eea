"""Loads weights from a checkpoint, or random ones: checked, fused, quantised, and on the device.

Nothing is converted until all tensors are known to exist with the right shapes, and no weight is held twice:
each checkpoint tensor is memory-mapped and read straight into its place. Of a model that is quantised to 4 or
8 bits, only one fused weight at a time exists unquantised.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from realengine.model.architecture import Architecture
from realengine.model.quantization import (
    QuantisedWeight,
    Weights,
    check_int4_inputs,
    check_quantization,
    concatenated,
    is_linear,
    quantised,
)
from realengine.progress import QUIET, Progress
from realengine.weights.fp8 import Fp8Checkpoint
from realengine.weights.gguf import GgufFile
from realengine.weights.gpt_oss import read_experts
from realengine.weights.packed import is_packed, read_packed
from realengine.weights.quantized_formats import PackedFormat, stored_as
from realengine.weights.safetensors import SafetensorsCheckpoint
from realengine.weights.table import GGUF, HUGGING_FACE, ExpertShare, expected, of_stage, placed, shard
from realengine.weights.weight import Part, Weight

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Tensors of some checkpoints that are computed from the configuration here; the head only if it is tied.
COMPUTED = re.compile(r".*rotary_emb\.inv_freq|.*\.masked_bias|rope_freqs\.weight")
SHOWN = 5  # names in one error


class Checkpoint(Protocol):
    """Interface of a file format: shapes by name, and parts of tensors on the CPU."""

    shapes: dict[str, tuple[int, ...]]

    def where(self, name: str) -> Path: ...

    def read(self, name: str, take: Sequence[slice], *, integers: bool = False) -> torch.Tensor: ...


class _GgufCheckpoint:
    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.shapes = {name: tensor.shape for name, tensor in file.tensors.items()}

    def where(self, name: str) -> Path:
        return self.file.path

    def read(self, name: str, take: Sequence[slice], *, integers: bool = False) -> torch.Tensor:
        assert not integers, "GGUF has no words"
        return self.file.read(name, take)


def load_weights(
    source: Path | str | GgufFile | None,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    quantization: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    layers: range | None = None,
    experts: ExpertShare | None = None,
    seed: int = 0,
    progress: Progress = QUIET,
) -> Weights:
    """Returns all weights by their own names (`realengine.weights.table`), with head.weight even if tied.

    source: a safetensors file or folder, a .gguf file (or an open one), or None: random, drawn with the seed.
    quantization: format of the linear layers (`realengine.model.quantization`); weights that the checkpoint
    stores in 4 bits stay in 4 bits. rank, world_size: this tensor-parallel rank's share. layers: those of
    this pipeline stage; None: all. experts: of an expert-parallel rank. Raises ValueError
    with file and tensor for missing, misshapen, truncated, non-finite and unknown tensors, for shapes that
    the quantization does not support, and if world_size does not divide a size of the architecture.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: weights are float32, float16 or bfloat16")
    check_quantization(quantization)
    device = torch.device(device)
    if source is None:
        weights = expected(architecture)
        quantization = "w4a16" if architecture.packed is not None else quantization
        if architecture.gpt_oss is not None and architecture.gpt_oss.is_packed:
            quantization = quantization or "mxfp4"  # as the checkpoint

        def made(weight: Weight, share: Weight) -> torch.Tensor | QuantisedWeight:
            return quantised(
                weight.name, random_weight(weight, share, dtype, device, seed=seed), quantization
            )
    else:
        checkpoint, names = _open(source)
        weights = expected(architecture, names)
        packed = architecture.packed
        ignored = _mtp_names(checkpoint, architecture.num_layers)
        _check(
            weights,
            checkpoint,
            packed,
            ignored=[*ignored, names["head"]] if architecture.tie_word_embeddings else ignored,
        )

        def made(weight: Weight, share: Weight) -> torch.Tensor | QuantisedWeight:
            if packed is not None and is_packed(weight, checkpoint):
                return concatenated(read_packed(weight, share, checkpoint, packed, device))
            if isinstance(checkpoint, Fp8Checkpoint) and quantization == "fp8" and is_linear(weight.name):
                kept = checkpoint.kept(share, device)
                if kept is not None:
                    return kept
            if weight.stored:
                read = read_experts(weight, checkpoint, dtype, device)
                return quantised(weight.name, read, quantization) if isinstance(read, torch.Tensor) else read
            return quantised(weight.name, _assemble(share, checkpoint, dtype, device), quantization)

    if layers is not None:
        weights = of_stage(weights, layers, architecture.num_layers)
    shares = shard(weights, rank, world_size, experts)
    pairs = progress.over(list(zip(weights, shares, strict=True)), "Loading weights")
    tensors = {weight.name: made(weight, share) for weight, share in pairs}
    if architecture.tie_word_embeddings:
        embedding = tensors["embedding.weight"]
        assert isinstance(embedding, torch.Tensor)
        rows = architecture.vocab_size // world_size
        tensors["head.weight"] = embedding if world_size == 1 else embedding[rank * rows : (rank + 1) * rows]
    return tensors


def load_table(
    weights: Sequence[Weight],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    ignored: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Returns the weights of a table from a checkpoint. Raises ValueError as `load_weights` does.

    ignored: tensors of the checkpoint that are not read.
    """
    _check(weights, checkpoint, None, ignored)
    return {weight.name: _assemble(weight, checkpoint, dtype, device) for weight in weights}


def _open(source: Path | str | GgufFile) -> tuple[Checkpoint, Mapping[str, str]]:
    if isinstance(source, GgufFile):
        return _GgufCheckpoint(source), GGUF
    path = Path(source)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if path.suffix == ".gguf":
        return _GgufCheckpoint(GgufFile(path)), GGUF
    checkpoint = SafetensorsCheckpoint(path)
    if any(map(checkpoint.is_fp8, checkpoint.shapes)):
        return Fp8Checkpoint(checkpoint), HUGGING_FACE
    return checkpoint, HUGGING_FACE


def _check(
    weights: Sequence[Weight], checkpoint: Checkpoint, packed: PackedFormat | None, ignored: Collection[str]
) -> None:
    """Raises ValueError for missing, misshapen and unused tensors."""
    stored: dict[str, tuple[int, ...]] = {}
    optional: set[str] = set()
    for weight in weights:
        if packed is None or not is_packed(weight, checkpoint):
            stored.update({part.name: part.shape for part in weight.parts})
            continue
        check_int4_inputs(weight.name, weight.shape[-1])
        for part in weight.parts:
            stored.update(packed.shapes(part.name, part.shape))
            optional.add(stored_as(part.name, "g_idx"))
            bias = stored_as(part.name, "bias")
            # Some of GPTQ's tools write a bias of zeros for layers that have none.
            if bias in checkpoint.shapes and not checkpoint.read(bias, [slice(None)]).any():
                optional.add(bias)
    if missing := [name for name in stored if name not in checkpoint.shapes]:
        raise ValueError(f"{checkpoint.where(missing[0])}: missing: {_some(missing)}")
    for name, shape in stored.items():
        if (found := checkpoint.shapes[name]) != shape:
            raise ValueError(f"{checkpoint.where(name)}: {name} is {list(found)}, must be {list(shape)}")
    known = optional.union(stored, ignored)
    extra = [name for name in checkpoint.shapes if name not in known and not COMPUTED.fullmatch(name)]
    if extra:
        raise ValueError(
            f"{checkpoint.where(extra[0])}: unknown to this architecture, so outputs would be wrong: "
            f"{_some(extra)}"
        )


def _mtp_names(checkpoint: Checkpoint, num_layers: int) -> list[str]:
    """Returns the tensors of modules for multi-token prediction, which only a draft reads.

    They are `mtp.*`, or layers behind the model's own, each with a projection `eh_proj`.
    """
    prefixes = ["mtp."]
    while f"model.layers.{num_layers}.eh_proj.weight" in checkpoint.shapes:
        prefixes.append(f"model.layers.{num_layers}.")
        num_layers += 1
    return [name for name in checkpoint.shapes if name.startswith(tuple(prefixes))]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _assemble(
    weight: Weight, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    dtype = torch.float32 if weight.offset else dtype
    own = torch.empty(weight.shape, dtype=dtype, device=device)
    for part in weight.parts:
        own[part.into].copy_(_halves(checkpoint.read(part.name, part.take), part))
    if not own.isfinite().all():
        bad = next((part.name for part in weight.parts if not own[part.into].isfinite().all()), weight.name)
        file = checkpoint.where(weight.parts[0].name)
        raise ValueError(f"{file}: {bad}: contains infinite numbers or NaN in {dtype}")
    return own.add_(weight.offset) if weight.offset else own


def _halves(stored: torch.Tensor, part: Part) -> torch.Tensor:
    """Reorders rows of each head from 0, D/2, 1, D/2 + 1, ... to 0, 1, 2, ...: rotary pairs i, i + D/2."""
    if part.interleaved_head_dim is None:
        return stored
    pairs = stored.reshape(-1, part.interleaved_head_dim // 2, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape)


STANDARD_DEVIATION = 0.02


def random_weight(
    weight: Weight, share: Weight, dtype: torch.dtype, device: torch.device, *, seed: int = 0
) -> torch.Tensor:
    """Returns a rank's share of one weight: normal with standard deviation 0.02; norms are ones.

    Drawn on the device; equal seeds give equal weights. Each tensor has its own stream, (seed, name), and a
    rank draws the whole tensor and keeps its share, so the ranks together hold the weights of one device.
    """
    drawn = _drawn(weight, seed, dtype, device)
    if share.experts is not None:
        drawn, weight = drawn[list(share.experts)], placed(weight, share.experts)
    return drawn if share is weight else _share_of(drawn, weight, share)


def _drawn(weight: Weight, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if weight.name.endswith("norm.weight"):
        return torch.ones(weight.shape, dtype=dtype, device=device)
    stream = hashlib.blake2b(f"{seed}/{weight.name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(stream, "little") >> 1)
    drawn = torch.empty(weight.shape, dtype=dtype, device=device)
    return drawn.normal_(std=STANDARD_DEVIATION, generator=generator)


def _share_of(drawn: torch.Tensor, weight: Weight, share: Weight) -> torch.Tensor:
    own = torch.empty(share.shape, dtype=drawn.dtype, device=drawn.device)
    for before, after in zip(weight.parts, share.parts, strict=True):
        take = (
            slice(a.start - b.start, a.stop - b.start) for a, b in zip(after.take, before.take, strict=True)
        )
        own[after.into] = drawn[before.into][tuple(take)]
    return own
