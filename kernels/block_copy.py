"""Copies KV blocks of all layers at once: within the cache (copy-on-write), or by a staging buffer (swap).

One launch moves a list of blocks of every layer's key and value tensors. A block of a layer is contiguous, so
it is a plain, memory-bound copy (each byte is read once and written once). Swapping uses a staging buffer on
the device, so that one large transfer crosses the bus instead of a small one per layer and block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.case import Case
from kernels.launch import INTERPRETER, launch, target

WORD = 4  # bytes: blocks are moved as int32


class Tiles(NamedTuple):
    """Words that one program moves, and its number of warps."""

    words: int
    num_warps: int


TILES = {
    "sm_80": Tiles(4096, 4),
    "sm_90": Tiles(4096, 4),
    "gfx942": Tiles(4096, 4),
    INTERPRETER: Tiles(16384, 4),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSet:
    """Tensors of all layers whose blocks move together, with their offsets from the first, in units.

    It is built once by `CacheSet.of`; the tensors must outlive it. Key and value caches make one set; scales,
    whose blocks have another size, make another.
    """

    tensors: tuple[torch.Tensor, ...]
    offsets: torch.Tensor
    block_bytes: int
    unit_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> CacheSet:
        """Builds a set of contiguous [num_blocks, ...] tensors of one shape, dtype and device.

        Raises ValueError if they are not.
        """
        if not tensors:
            raise ValueError("no cache tensors")
        first = tensors[0]
        for x in tensors:
            if x.shape != first.shape or x.dtype != first.dtype or x.device != first.device:
                raise ValueError(
                    f"{x.dtype} {list(x.shape)} beside {first.dtype} {list(first.shape)}: must be alike"
                )
            if x.dim() < 2 or not x.is_contiguous():
                raise ValueError(f"cache {list(x.shape)}: must be contiguous [num_blocks, ...]")
        block_bytes = first[0].numel() * first.element_size()
        starts = [x.data_ptr() - first.data_ptr() for x in tensors]
        unit = 16 if all(n % 16 == 0 for n in [block_bytes, first.data_ptr(), *starts]) else WORD
        if block_bytes % unit or any(start % unit for start in starts):
            raise ValueError(
                f"blocks of {block_bytes} bytes: must be a multiple of {WORD}, and aligned to it"
            )
        offsets = torch.tensor([start // unit for start in starts], dtype=torch.int64, device=first.device)
        return cls(tensors=tuple(tensors), offsets=offsets, block_bytes=block_bytes, unit_bytes=unit)

    def staging(self, num_blocks: int) -> torch.Tensor:
        """Returns a buffer for that many blocks: [num_blocks, num_tensors, ...] on the device."""
        first = self.tensors[0]
        return first.new_empty((num_blocks, len(self.tensors), *first.shape[1:]))


def copy_blocks(caches: CacheSet, pairs: torch.Tensor) -> None:
    """Copies block pairs[n, 0] to block pairs[n, 1] in every tensor of the set.

    pairs: contiguous [N, 2] int32 or int64 on the device. No destination may be a source or a destination of
    another pair, because the order of copies is undefined. Raises ValueError on other shapes and dtypes.
    """
    _check_indices("pairs", pairs, (len(pairs), 2))
    first = caches.tensors[0]
    stride = caches.block_bytes // caches.unit_bytes
    _move(
        caches,
        pairs,
        pairs[:, 1:],
        2,
        first,
        first,
        caches.offsets,
        caches.offsets,
        stride,
        stride,
        len(pairs),
    )


def gather_blocks(caches: CacheSet, blocks: torch.Tensor, staging: torch.Tensor) -> None:
    """Copies block blocks[n] of every tensor t to staging[n, t].

    blocks: [N] int32 or int64; staging: from `CacheSet.staging`, for N or more. Raises ValueError otherwise.
    """
    _check_indices("blocks", blocks, (len(blocks),))
    _check_staging(caches, staging, len(blocks))
    block, row = _strides(caches)
    places, offsets = _staging_places(caches, len(blocks))
    _move(
        caches,
        blocks,
        places,
        1,
        caches.tensors[0],
        staging,
        caches.offsets,
        offsets,
        block,
        row,
        len(blocks),
    )


def scatter_blocks(staging: torch.Tensor, blocks: torch.Tensor, caches: CacheSet) -> None:
    """Copies staging[n, t] to block blocks[n] of every tensor t, the inverse of gather_blocks.

    The blocks must differ.
    """
    _check_indices("blocks", blocks, (len(blocks),))
    _check_staging(caches, staging, len(blocks))
    block, row = _strides(caches)
    places, offsets = _staging_places(caches, len(blocks))
    _move(
        caches,
        places,
        blocks,
        1,
        staging,
        caches.tensors[0],
        offsets,
        caches.offsets,
        row,
        block,
        len(blocks),
    )


@triton.jit
def move_blocks_kernel(
    from_ptr,
    to_ptr,
    from_offsets_ptr,
    to_offsets_ptr,
    from_index_ptr,
    to_index_ptr,
    from_stride,
    to_stride,
    words,
    INDEX_STEP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moves a tile of BLOCK words of one block of one tensor: grid (blocks, tensors, tiles)."""
    n = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    source = tl.load(from_index_ptr + n * INDEX_STEP).to(tl.int64) * from_stride
    destination = tl.load(to_index_ptr + n * INDEX_STEP).to(tl.int64) * to_stride
    source += tl.load(from_offsets_ptr + which)
    destination += tl.load(to_offsets_ptr + which)
    offs = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < words
    # Offsets are units times UNIT words, so the compiler sees the alignment and moves 16 bytes at once.
    moved = tl.load(from_ptr + source * UNIT + offs, mask=mask)
    tl.store(to_ptr + destination * UNIT + offs, moved, mask=mask)


def copy_blocks_reference(caches: CacheSet, pairs: torch.Tensor) -> None:
    """Computes the reference of `copy_blocks` in torch."""
    source, destination = pairs.long().unbind(1)
    for x in caches.tensors:
        _bytes(x)[destination] = _bytes(x)[source]


def gather_blocks_reference(caches: CacheSet, blocks: torch.Tensor, staging: torch.Tensor) -> None:
    """Computes the reference of `gather_blocks` in torch."""
    for t, x in enumerate(caches.tensors):
        _bytes(staging)[: len(blocks), t] = _bytes(x)[blocks.long()]


def scatter_blocks_reference(staging: torch.Tensor, blocks: torch.Tensor, caches: CacheSet) -> None:
    """Computes the reference of `scatter_blocks` in torch."""
    for t, x in enumerate(caches.tensors):
        _bytes(x)[blocks.long()] = _bytes(staging)[: len(blocks), t]


def cases() -> Iterator[Case]:
    """Yields blocks of 16 tokens: Llama-3.1-8B with 32 layers, SmolLM2-135M with 30, scales of 3 KV heads."""
    for num_blocks, layers, shape, dtype in (
        (1, 32, (16, 8, 128), torch.bfloat16),
        (64, 32, (16, 8, 128), torch.bfloat16),
        (16, 30, (16, 3, 64), torch.bfloat16),
        (16, 30, (16, 3), torch.float32),
    ):
        moved = 4.0 * num_blocks * layers * torch.Size(shape).numel() * dtype.itemsize
        sizes = "x".join(str(size) for size in shape)
        for name, call in (("copy", _copy_call), ("gather", _gather_call), ("scatter", _scatter_call)):
            make = _case(num_blocks, layers, shape, dtype, call)
            yield Case(f"{name}_blocks-{num_blocks}x{layers}x{sizes}", make, moved)


def _move(
    caches: CacheSet,
    from_index: torch.Tensor,
    to_index: torch.Tensor,
    index_step: int,
    source: torch.Tensor,
    destination: torch.Tensor,
    from_offsets: torch.Tensor,
    to_offsets: torch.Tensor,
    from_stride: int,
    to_stride: int,
    count: int,
) -> None:
    tiles = TILES.get(target(), TILES["sm_90"])
    words = caches.block_bytes // WORD
    block = min(tiles.words, triton.next_power_of_2(words))
    launch(
        move_blocks_kernel,
        (count, len(caches.tensors), triton.cdiv(words, block)),
        _words(source),
        _words(destination),
        from_offsets,
        to_offsets,
        from_index,
        to_index,
        from_stride,
        to_stride,
        words,
        INDEX_STEP=index_step,
        UNIT=caches.unit_bytes // WORD,
        BLOCK=block,
        num_warps=tiles.num_warps,
    )


def _words(x: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a contiguous tensor as int32."""
    return x.reshape(-1).view(torch.int32)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Returns the memory as bytes, leading dimensions kept; any dtype supports indexed assignment then."""
    return x.view(torch.uint8)


def _strides(caches: CacheSet) -> tuple[int, int]:
    """Returns the units from block to block in a cache tensor, and from row to row of a staging buffer."""
    block = caches.block_bytes // caches.unit_bytes
    return block, block * len(caches.tensors)


def _staging_places(caches: CacheSet, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows of the staging buffer, and each tensor's offset in a row."""
    device = caches.offsets.device
    block = caches.block_bytes // caches.unit_bytes
    places = torch.arange(count, dtype=torch.int32, device=device)
    return places, torch.arange(len(caches.tensors), dtype=torch.int64, device=device) * block


def _check_indices(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape or x.dtype not in (torch.int32, torch.int64) or not x.is_contiguous():
        raise ValueError(
            f"{name}: {x.dtype} {list(x.shape)}; must be contiguous int32 or int64 "
            f"{'[N, 2]' if shape[1:] else '[N]'}"
        )


def _check_staging(caches: CacheSet, staging: torch.Tensor, count: int) -> None:
    shape = (len(caches.tensors), *caches.tensors[0].shape[1:])
    if staging.shape[1:] != shape or staging.dtype != caches.tensors[0].dtype or not staging.is_contiguous():
        raise ValueError(
            f"staging: {staging.dtype} {list(staging.shape)}; must be contiguous [N, *{list(shape)}]"
        )
    if len(staging) < count:
        raise ValueError(f"staging holds {len(staging)} blocks, {count} are asked for")
    if staging.data_ptr() % caches.unit_bytes:
        raise ValueError(f"staging must be aligned to {caches.unit_bytes} bytes")


def _copy_call(caches: CacheSet, blocks: torch.Tensor, staging: torch.Tensor) -> Callable[[], object]:
    pairs = torch.stack([blocks, blocks + len(blocks)], dim=1).contiguous()
    return lambda: copy_blocks(caches, pairs)


def _gather_call(caches: CacheSet, blocks: torch.Tensor, staging: torch.Tensor) -> Callable[[], object]:
    return lambda: gather_blocks(caches, blocks, staging)


def _scatter_call(caches: CacheSet, blocks: torch.Tensor, staging: torch.Tensor) -> Callable[[], object]:
    return lambda: scatter_blocks(staging, blocks, caches)


def _case(
    num_blocks: int,
    layers: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    call: Callable[[CacheSet, torch.Tensor, torch.Tensor], Callable[[], object]],
) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        size = (2 * num_blocks + 1, *shape)
        caches = CacheSet.of([torch.zeros(size, dtype=dtype, device=device) for _ in range(2 * layers)])
        blocks = torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)
        return call(caches, blocks, caches.staging(num_blocks))

    return make
