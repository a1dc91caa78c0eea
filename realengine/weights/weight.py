"""One tensor of the engine, and the tensors of a checkpoint that it is assembled from."""

from __future__ import annotations

from dataclasses import dataclass

Index = tuple[int | slice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One checkpoint tensor and its destination: own[into] = stored[take]."""

    name: str
    """Name of the tensor in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the tensor in the checkpoint."""
    into: Index
    take: tuple[slice, ...]
    interleaved_head_dim: int | None = None
    """Head dimension if each head's rows are stored as interleaved rotary pairs: 0, D/2, 1, D/2 + 1, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One tensor of the engine."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    split: int | None = None
    """Axis, from the end, that tensor-parallel ranks divide, here and in every part; None: not divided."""
    divided: tuple[tuple[str, int], ...] = ()
    """Sizes of the architecture that a tensor-parallel size must divide."""
    experts: tuple[int, ...] | None = None
    """Experts that an expert-parallel rank has, by slot, of a weight [experts, ...]; None: all in order."""
    stored: str = ""
    """Layout of the checkpoint, if parts are not slices of the weight (`realengine.weights.gpt_oss`)."""
    offset: float = 0.0
    """Added to the stored numbers, in fp32, in which the weight is kept (Gemma's norms)."""


def whole(
    name: str, stored: str, shape: tuple[int, ...], *, divided: tuple[tuple[str, int], ...] = ()
) -> Weight:
    """Returns a weight of one unchanged checkpoint tensor."""
    return Weight(name=name, shape=shape, parts=(part_of(stored, shape),), divided=divided)


def part_of(stored: str, shape: tuple[int, ...], into: Index | None = None, order: int | None = None) -> Part:
    """Returns a part that takes a whole checkpoint tensor; into=None: it is the whole weight."""
    take = everything(shape)
    into = take if into is None else into
    return Part(name=stored, shape=shape, into=into, take=take, interleaved_head_dim=order)


def everything(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns the index of all of a tensor."""
    return tuple(slice(0, size) for size in shape)
