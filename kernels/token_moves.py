"""Moves the KV of single tokens in all layers at once: those of accepted tree nodes to consecutive slots.

One program moves a part of the tokens of one sequence in one tensor, level by level, so a slot may be read
before another token of the sequence moves there. Each byte is read once and written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from kernels.block_copy import WORD, CacheSet
from kernels.case import Case
from kernels.launch import launch

MAX_TILE = 1024  # words that one program moves of each token


def move_tokens(caches: CacheSet, sources_BD: torch.Tensor, destinations_BD: torch.Tensor) -> None:
    """Copies a token's slot sources_BD[b, d] to slot destinations_BD[b, d] in every tensor of the set.

    sources_BD, destinations_BD: int64 on the device, contiguous. Slot block * block_size + i is place i of a
    block of tensors [num_blocks, block_size, ...]. The tokens of a sequence b are moved in order of d, so a
    slot may be a destination after it was a source; slots of different sequences must differ. Pairs with a
    negative slot, and equal pairs, are skipped. Raises ValueError for other shapes and dtypes.
    """
    token_bytes = _token_bytes(caches)
    for name, x in (("sources_BD", sources_BD), ("destinations_BD", destinations_BD)):
        if x.dim() != 2 or x.shape != sources_BD.shape or x.dtype != torch.int64 or not x.is_contiguous():
            raise ValueError(
                f"{name}: {x.dtype} {list(x.shape)}; must be contiguous int64 [sequences, tokens], "
                "the shape of sources_BD"
            )
    words = token_bytes // WORD
    tile = min(MAX_TILE, triton.next_power_of_2(words))
    num_seqs, depth = sources_BD.shape
    launch(
        move_tokens_kernel,
        (num_seqs, len(caches.tensors), triton.cdiv(words, tile)),
        caches.tensors[0].view(-1).view(torch.int32),
        caches.offsets,
        sources_BD,
        destinations_BD,
        depth,
        words,
        UNIT=caches.unit_bytes // WORD,
        TILE=tile,
        num_warps=max(1, min(4, tile // 128)),
    )


@triton.jit(do_not_specialize=["depth"], do_not_specialize_on_alignment=["sources_ptr", "destinations_ptr"])
def move_tokens_kernel(
    cache_ptr,
    offsets_ptr,
    sources_ptr,
    destinations_ptr,
    depth,
    words,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Moves TILE words of the tokens of one sequence in one tensor: grid (sequences, tensors, tiles)."""
    seq = tl.program_id(0).to(tl.int64)
    base_ptr = cache_ptr + tl.load(offsets_ptr + tl.program_id(1)) * UNIT
    offs = tl.program_id(2) * TILE + tl.arange(0, TILE)
    for level in range(depth):
        source = tl.load(sources_ptr + seq * depth + level)
        destination = tl.load(destinations_ptr + seq * depth + level)
        mask = (offs < words) & (source >= 0) & (destination >= 0) & (source != destination)
        moved = tl.load(base_ptr + source * words + offs, mask=mask)
        tl.debug_barrier()  # no thread writes a slot that another one has still to read
        tl.store(base_ptr + destination * words + offs, moved, mask=mask)
        tl.debug_barrier()  # nor reads one that another has still to write


def move_tokens_reference(caches: CacheSet, sources_BD: torch.Tensor, destinations_BD: torch.Tensor) -> None:
    """Computes the reference of `move_tokens` in torch."""
    is_moved_BD = (sources_BD >= 0) & (destinations_BD >= 0)
    for level, is_moved in enumerate(is_moved_BD.T):
        source, destination = sources_BD[is_moved, level], destinations_BD[is_moved, level]
        for x in caches.tensors:
            by_slot = x.view(torch.uint8).flatten(0, 1)
            by_slot[destination] = by_slot[source]


def cases() -> Iterator[Case]:
    """Yields 4 tokens per sequence of Llama-3.1-8B (32 layers) and SmolLM2-135M (30), and scales."""
    for num_seqs, layers, shape, dtype in (
        (1, 32, (16, 8, 128), torch.bfloat16),
        (64, 32, (16, 8, 128), torch.bfloat16),
        (16, 30, (16, 3, 64), torch.bfloat16),
        (16, 30, (16, 3), torch.float32),
    ):
        moved = 4.0 * 4 * num_seqs * layers * torch.Size(shape[1:]).numel() * dtype.itemsize
        sizes = "x".join(str(size) for size in shape)
        make = _case(num_seqs, layers, shape, dtype)
        yield Case(f"move_tokens-{num_seqs}x{layers}x{sizes}", make, moved)


def _token_bytes(caches: CacheSet) -> int:
    first = caches.tensors[0]
    num_bytes = caches.block_bytes // first.shape[1]
    if num_bytes % WORD:
        raise ValueError(f"tokens of {num_bytes} bytes: must be a multiple of {WORD}")
    return num_bytes


def _case(
    num_seqs: int, layers: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        size = (num_seqs + 1, *shape)
        caches = CacheSet.of([torch.zeros(size, dtype=dtype, device=device) for _ in range(2 * layers)])
        first = shape[0] * torch.arange(1, num_seqs + 1, device=device)[:, None]
        levels = torch.arange(1, 5, device=device)
        sources, destinations = first + 2 * levels, first + levels
        return lambda: move_tokens(caches, sources, destinations)

    return make
