"""KV in host memory: swapped-out sequences, and the cache tier below the GPU's memory.

`HostKv` is the memory, on every tensor-parallel rank; `HostPlaces`, on rank 0, tracks its contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from heapq import heappop, heappush
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.block_copy import CacheSet
from policies.core.plan import Content, Transfer
from realengine.model.backend import Backend
from realengine.model.kv_cache import KvCache

STAGED_BLOCKS = 64
CHUNK_BLOCKS = 256
Pairs = NDArray[np.int32]


class HostKv:
    """Host memory for blocks of all layers, in chunks allocated on first use, pinned if there is a GPU."""

    def __init__(self, cache: KvCache, backend: Backend) -> None:
        self._cache = cache
        self._backend = backend

    @cached_property
    def _sets(self) -> list[tuple[CacheSet, list[torch.Tensor], torch.Tensor]]:
        """Each set of cache tensors with its chunks in host memory and a staging buffer on the device."""
        return [(caches, [], caches.staging(STAGED_BLOCKS)) for caches in self._cache.cache_sets]

    def warm_up(self) -> None:
        """Copies block 0 to the staging buffers and back, which compiles the kernels."""
        for caches, _, staging in self._sets:
            blocks = torch.zeros(1, dtype=torch.int32, device=staging.device)
            self._backend.gather_blocks(caches, blocks, staging)
            self._backend.scatter_blocks(staging, blocks, caches)

    def store(self, pairs: Pairs) -> None:
        """Copies blocks pairs[:, 0] of the cache to places pairs[:, 1], in the device's order."""
        for part, runs in _parts(pairs):
            for caches, chunks, staging in self._sets:
                blocks = torch.from_numpy(part[:, 0].copy()).to(staging.device)
                self._backend.gather_blocks(caches, blocks, staging)
                for row, place, length in runs:
                    here = _places(caches, chunks, place, length)
                    here.copy_(staging[row : row + length], non_blocking=True)

    def load(self, pairs: Pairs) -> None:
        """Copies places pairs[:, 1] to blocks pairs[:, 0] of the cache, in the device's order."""
        for part, runs in _parts(pairs):
            for caches, chunks, staging in self._sets:
                for row, place, length in runs:
                    here = _places(caches, chunks, place, length)
                    staging[row : row + length].copy_(here, non_blocking=True)
                blocks = torch.from_numpy(part[:, 0].copy()).to(staging.device)
                self._backend.scatter_blocks(staging, blocks, caches)


def _places(caches: CacheSet, chunks: list[torch.Tensor], place: int, length: int) -> torch.Tensor:
    """Returns the memory of neighbouring places of one chunk."""
    number, first = divmod(place, CHUNK_BLOCKS)
    like = caches.tensors[0]
    size = (CHUNK_BLOCKS, len(caches.tensors), *like.shape[1:])
    while len(chunks) <= number:
        chunks.append(torch.empty(size, dtype=like.dtype, pin_memory=like.is_cuda))
    return chunks[number][first : first + length]


def _parts(pairs: Pairs) -> Iterator[tuple[Pairs, list[tuple[int, int, int]]]]:
    """Splits pairs into staged parts, with runs of neighbouring places as (row, place, length)."""
    for begin in range(0, len(pairs), STAGED_BLOCKS):
        part = pairs[begin : begin + STAGED_BLOCKS]
        runs = []
        for _, run in groupby(enumerate(part[:, 1].tolist()), key=_run_of):
            rows = list(run)
            runs.append((*rows[0], len(rows)))
        yield part, runs


def _run_of(pair: tuple[int, int]) -> tuple[int, int]:
    row, place = pair
    return place - row, place // CHUNK_BLOCKS


class HostPlaces:
    """Places of contents in host memory, by name. The core makes sure that there are never too many."""

    def __init__(self) -> None:
        self._free: list[int] = []  # a heap: the lowest place first, so that used places are neighbours
        self._num_places = 0
        self._place_of: dict[Content, int] = {}

    def moves(self, transfers: Iterable[Transfer]) -> Iterator[tuple[bool, Pairs]]:
        """Yields copies in order: (whether into host memory, (block, place) pairs)."""
        for transfer in transfers:
            if transfer.target == "host":
                yield True, _pairs(transfer.blocks, [self._take(name) for name in transfer.contents])
            elif transfer.target == "gpu":
                yield False, _pairs(transfer.blocks, [self._place_of[name] for name in transfer.contents])
            else:
                for name in transfer.contents:
                    heappush(self._free, self._place_of.pop(name))

    def _take(self, name: Content) -> int:
        if not self._free:
            self._free.append(self._num_places)
            self._num_places += 1
        place = self._place_of[name] = heappop(self._free)
        return place


def _pairs(blocks: Iterable[int], places: Iterable[int]) -> Pairs:
    return np.array([*zip(blocks, places, strict=True)], np.int32).reshape(-1, 2)
