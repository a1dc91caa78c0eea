"""Copies KV blocks of all layers at once: within the cache (copy-on-write), or via a staging buffer (swap).

One launch copies a list of blocks of every layer's key and value tensors. A block of a layer is contiguous,
so it is a plain, memory-bound copy (each byte is read once and written once). Swapping uses a staging buffer
on the device, so that there is one large transfer over the bus instead of a small one per layer and block.
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

WORD = 4  # bytes of a word: blocks are copied as int32


class Tiles(NamedTuple):
    """Words that one program copies, and its number of warps."""

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
    """Cache tensors of all layers with blocks of one size, and their offsets from the first, in units.

    It is built once by `CacheSet.of`; the tensors must outlive it. Key and value caches form one set; their
    scales, which have blocks of another size, form another.
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
                    f"caches of {x.dtype} {list(x.shape)} and {first.dtype} {list(first.shape)}: must have "
                    "the same dtype, shape and device"
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
    rows, offsets = _staging_rows(caches, len(blocks))
    _move(
        caches,
        blocks,
        rows,
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

    All blocks must be different.
    """
    _check_indices("blocks", blocks, (len(blocks),))
    _check_staging(caches, staging, len(blocks))
    block, row = _strides(caches)
    rows, offsets = _staging_rows(caches, len(blocks))
    _move(
        caches,
        rows,
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
    """Copies a tile of BLOCK words of one block of one tensor: grid (blocks, tensors, tiles)."""
    n = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    source = tl.load(from_index_ptr + n * INDEX_STEP).to(tl.int64) * from_stride
    destination = tl.load(to_index_ptr + n * INDEX_STEP).to(tl.int64) * to_stride
    source += tl.load(from_offsets_ptr + which)
    destination += tl.load(to_offsets_ptr + which)
    offs = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < words
    # Offsets are multiples of UNIT words: the compiler knows the alignment and copies 16 bytes at once.
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
    """Yields blocks of 16 tokens of Llama-3.1-8B (32 layers) and SmolLM2-135M (30), and scales of 3 heads."""
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
    """Returns the memory as bytes with the leading dimensions; not every dtype supports index assignment."""
    return x.view(torch.uint8)


def _strides(caches: CacheSet) -> tuple[int, int]:
    """Returns the units from block to block in a cache tensor, and from row to row of a staging buffer."""
    block = caches.block_bytes // caches.unit_bytes
    return block, block * len(caches.tensors)


def _staging_rows(caches: CacheSet, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first `count` rows of the staging buffer, and the offset of each tensor in a row."""
    device = caches.offsets.device
    block = caches.block_bytes // caches.unit_bytes
    rows = torch.arange(count, dtype=torch.int32, device=device)
    return rows, torch.arange(len(caches.tensors), dtype=torch.int64, device=device) * block


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
        raise ValueError(f"staging of {len(staging)} blocks: must have at least {count}")
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
