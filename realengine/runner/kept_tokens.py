"""Which KV decoding sequences keep, and where: what executor and runner ask of a cache that drops KV."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from policies.caching.pool import Caching
from policies.core.plan import StepPlan
from realengine.model.architecture import Architecture
from realengine.model.backend import Backend
from realengine.model.kv_cache import KvCache

Cut = tuple[int, ...]
"""What a step does to one prompt, in words of the cache that drops KV."""


class KeptTokens(Protocol):
    """The KV that decoding sequences keep. Rows of prompts have their tokens at their positions."""

    def observed(self, backend: Backend) -> Backend:
        """Returns the backend that the model calls."""

    def places(self, positions_T: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        """Returns the places of decoded tokens at these positions, of sequences in these slots."""

    def contexts(self, lens_B: torch.Tensor, slots_B: torch.Tensor) -> torch.Tensor:
        """Returns the kept tokens of decoding sequences of these lengths."""

    def cuts(self, plan: StepPlan, filled: Collection[int]) -> tuple[Cut, ...]:
        """Returns what a plan does to prompts. filled: slots that other sequences have got before it."""

    def begin(self, cuts: tuple[Cut, ...]) -> None:
        """Prepares a step on the device."""

    def end(self, cuts: tuple[Cut, ...], cache: KvCache, tables_SM: torch.Tensor) -> None:
        """Ends a step with prompts. tables_SM: block tables by slot."""


def check_full_attention(architecture: Architecture, caching: Caching) -> None:
    """Raises ValueError if a model's attention is not a plain one, of which KV can be dropped."""
    windows = any(architecture.window(layer) is not None for layer in range(architecture.num_layers))
    if architecture.latent is not None or architecture.alibi or windows:
        raise ValueError(
            f"caching={type(caching).__name__}: a model of type {architecture.model_type} has latent "
            "attention, ALiBi or windows of its own; only full attention with rotary positions can drop KV"
        )
