"""Listeners to the contents of a KV cache, for the index of a router outside of it (vLLM's KV events)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol


class ContentListener(Protocol):
    """Is told which blocks a pool offers to lookups.

    names: the names of blocks, unique while they are offered. Blocks that only their own request can find
    (`content.PRIVATE_PLACES`) are not reported.
    """

    def stored(self, request_id: int, first: int, names: Sequence[Hashable]) -> None:
        """Handles new contents: the full blocks first, first + 1, ... of the tokens of a request."""

    def removed(self, names: Sequence[Hashable]) -> None:
        """Handles contents that are no longer in the cache: evicted, or never computed."""

    def stored_below(self, tier: str, names: Sequence[Hashable]) -> None:
        """Handles contents that are copied to a tier below the GPU: consecutive blocks of one place.

        The GPU or another tier has them, or has lost them since the last plan.
        """

    def removed_below(self, tier: str, names: Sequence[Hashable]) -> None:
        """Handles contents that a tier below the GPU has no longer."""
