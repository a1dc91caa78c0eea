"""Attention sinks with a window of recent tokens: where a decoding sequence has the KV that it keeps.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, with the memory of
`policies.caching.streaming`: a prompt is computed with full attention, and then cut. The window is a ring, in
which each new token takes the place of the oldest:

    place     | 0 ... S - 1 |  S ... S + R - 1           |    S sinks, R recent tokens
    token p   |  p < S: p   |  S + (p - S) mod R         |

Keys are rotated by the position of their token in the text, so the order of places does not matter, and no
stored key is rotated again. In the paper positions are places in the cache, so that texts may be longer than
the model's context; here they end at the context. Recent tokens have the same distances in both.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from policies.caching.streaming import StreamingLlm
from policies.core.plan import StepPlan
from realengine.model.architecture import Architecture
from realengine.model.backend import Backend
from realengine.model.kv_cache import KvCache
from realengine.runner.kept_tokens import Cut, check_full_attention


class KeptWindow(NamedTuple):
    """The kept tokens of every sequence that decodes."""

    num_sinks: int
    num_recent: int

    @classmethod
    def of(cls, architecture: Architecture, caching: StreamingLlm) -> KeptWindow:
        """Returns the window of an engine. Raises ValueError for other attention than full attention."""
        check_full_attention(architecture, caching)
        return cls(caching.num_sink_tokens, caching.num_recent_tokens)

    @property
    def num_kept(self) -> int:
        """Largest number of tokens of a decoding sequence."""
        return self.num_sinks + self.num_recent

    def observed(self, backend: Backend) -> Backend:
        """Returns the backend as it is: positions alone decide what is kept."""
        return backend

    def places(self, positions: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """Returns the places of tokens at these positions."""
        return self._places(positions)

    def _places(self, positions: torch.Tensor) -> torch.Tensor:
        rings = self.num_sinks + (positions - self.num_sinks) % self.num_recent
        return torch.where(positions < self.num_sinks, positions, rings)

    def contexts(self, lens: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of kept tokens of sequences of these lengths."""
        return lens.clamp(max=self.num_kept)

    def cuts(self, plan: StepPlan, _: Collection[int]) -> tuple[Cut, ...]:
        """Returns the slots, and the tokens with KV, of the prompts that are cut after a plan has run."""
        ends = [
            (chunk.seq.slots[0], chunk.num_cached + chunk.num_tokens)
            for chunk in plan.chunks
            if chunk.completes
        ]
        return tuple((slot, num_tokens) for slot, num_tokens in ends if num_tokens > self.num_kept)

    def begin(self, cuts: tuple[Cut, ...]) -> None:
        """Does nothing: prompts are cut when a step has been computed."""

    def end(self, cuts: tuple[Cut, ...], cache: KvCache, tables_SM: torch.Tensor) -> None:
        """Cuts the prompts that a step has completed."""
        for slot, num_tokens in cuts:
            self.cut(cache, tables_SM[slot], num_tokens)

    def cut(self, cache: KvCache, table_M: torch.Tensor, num_tokens: int) -> None:
        """Moves the recent ones of num_tokens tokens, which lie by position, to their places.

        table_M: blocks of the sequence.
        """
        size = cache.block_size
        positions = torch.arange(num_tokens - self.num_recent, num_tokens, device=table_M.device)
        sources, places = (
            table_M[at // size].long() * size + at % size for at in (positions, self._places(positions))
        )
        for layer in cache.layers:
            for tensor in layer:
                if tensor is not None:
                    rows = tensor.view(-1, *tensor.shape[2:]).view(torch.uint8)
                    rows.index_copy_(0, places, rows.index_select(0, sources))
