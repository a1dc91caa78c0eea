"""Keys and values of all layers in blocks: in the model's dtype, or 8 or 4 bits with scales per token.

A model with latent attention has one row per token instead, in the model's dtype, complete on every rank.
"""

from __future__ import annotations

from functools import cached_property

import torch

from kernels.block_copy import CacheSet
from kernels.paged_kv import LatentKv, PagedKv, vector_bytes
from realengine.model.architecture import Architecture


class KvCache:
    """num_blocks KV blocks and the unused block 0; a tensor-parallel rank has its own KV heads.

    dtype: the model's, torch.int8, torch.float8_e4m3fn or `INT4`.
    """

    def __init__(
        self,
        architecture: Architecture,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        world_size: int = 1,
        layers: range | None = None,
    ) -> None:
        """Creates an empty cache. layers: those of this pipeline stage; None: all."""
        self.block_size = block_size
        shape = (num_blocks + 1, block_size, architecture.num_kv_heads // world_size, architecture.head_dim)

        def layer() -> PagedKv | LatentKv:
            if architecture.latent is not None:
                width = architecture.latent.width
                return LatentKv(torch.zeros(*shape[:2], width, dtype=dtype, device=device))
            return PagedKv.zeros(shape, dtype, device)

        self.layers = {i: layer() for i in layers or range(architecture.num_layers)}
        self.attached: list[CacheSet] = []
        """Tensors of other caches with the same blocks, such as those of a draft model."""

    @staticmethod
    def bytes_per_block(
        architecture: Architecture,
        block_size: int,
        dtype: torch.dtype,
        world_size: int = 1,
        layers: range | None = None,
    ) -> int:
        """Returns the bytes of a block on each rank, scales included. layers: as of a cache."""
        num_layers = architecture.num_layers if layers is None else len(layers)
        if architecture.latent is not None:
            return num_layers * block_size * architecture.latent.width * dtype.itemsize
        num_heads = num_layers * (architecture.num_kv_heads // world_size)
        return int(2 * num_heads * block_size * vector_bytes(architecture.head_dim, dtype))

    @cached_property
    def own_sets(self) -> tuple[CacheSet, ...]:
        """The keys and values of all layers, and their scales, if any."""
        sets = [CacheSet.of([x for layer in self.layers.values() for x in layer[:2]])]
        scales = [x for layer in self.layers.values() for x in layer[2:] if x is not None]
        return (*sets, CacheSet.of(scales)) if scales else tuple(sets)

    @property
    def cache_sets(self) -> tuple[CacheSet, ...]:
        """Tensors that are copied and swapped with a block: its own, and those of attached caches."""
        return (*self.own_sets, *self.attached)
