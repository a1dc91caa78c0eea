"""The target model as drafters see it when they are built, and what building one gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from realengine.model.architecture import Architecture
from realengine.model.backend import Backend
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.runner.parallel import Group
from realengine.speculation.drafter import Drafter


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterContext:
    """The target model of one rank, and the sizes of its engine."""

    target: Decoder
    architecture: Architecture
    source: Path | None
    """The target's checkpoint; None: it has random weights."""
    backend: Backend
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    group: Group
    block_size: int
    max_model_len: int
    max_num_seqs: int
    seed: int


class LoadedDraft(NamedTuple):
    """A drafter with weights on the device, which still lacks its KV cache."""

    block_bytes: int
    """Bytes on each rank that it needs per KV block of the target."""
    build: Callable[[KvCache], Drafter]
    """Builds the drafter beside the target's KV cache: with as many blocks as it has."""
    draws: bool = False
    """Whether draft tokens are drawn from distributions, which the engine keeps until they are verified."""
