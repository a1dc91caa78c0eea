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

from typing import NamedTuple

import torch

from policies.caching.streaming import StreamingLlm
from policies.core.plan import StepPlan
from realengine.model.architecture import Architecture
from realengine.model.kv_cache import KvCache
from realengine.settings import EngineSettings


class KeptWindow(NamedTuple):
    """The kept tokens of every sequence that decodes."""

    num_sinks: int
    num_recent: int

    @classmethod
    def of(cls, architecture: Architecture, settings: EngineSettings) -> KeptWindow | None:
        """Returns the window of an engine; None: it drops no KV. Raises ValueError for other attention."""
        caching = settings.caching
        if not isinstance(caching, StreamingLlm):
            return None
        windows = any(architecture.window(layer) is not None for layer in range(architecture.num_layers))
        if architecture.latent is not None or architecture.alibi or windows:
            raise ValueError(
                f"caching=StreamingLlm: a model of type {architecture.model_type} has latent attention, "
                "ALiBi or windows of its own; only full attention with rotary positions can drop KV"
            )
        return cls(caching.num_sink_tokens, caching.num_recent_tokens)

    @property
    def num_kept(self) -> int:
        """Largest number of tokens of a decoding sequence."""
        return self.num_sinks + self.num_recent

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the places of tokens at these positions."""
        rings = self.num_sinks + (positions - self.num_sinks) % self.num_recent
        return torch.where(positions < self.num_sinks, positions, rings)

    def contexts(self, lens: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of kept tokens of sequences of these lengths."""
        return lens.clamp(max=self.num_kept)

    def cuts(self, plan: StepPlan) -> tuple[tuple[int, int], ...]:
        """Returns the slots, and the tokens with KV, of the prompts that are cut after a plan has run."""
        ends = [
            (chunk.seq.slots[0], chunk.num_cached + chunk.num_tokens)
            for chunk in plan.chunks
            if chunk.completes
        ]
        return tuple((slot, num_tokens) for slot, num_tokens in ends if num_tokens > self.num_kept)

    def cut(self, cache: KvCache, table_M: torch.Tensor, num_tokens: int) -> None:
        """Moves the recent ones of num_tokens tokens, which lie by position, to their places.

        table_M: blocks of the sequence.
        """
        size = cache.block_size
        positions = torch.arange(num_tokens - self.num_recent, num_tokens, device=table_M.device)
        sources, places = (
            table_M[at // size].long() * size + at % size for at in (positions, self.places(positions))
        )
        for layer in cache.layers:
            for tensor in layer:
                if tensor is not None:
                    rows = tensor.view(-1, *tensor.shape[2:]).view(torch.uint8)
                    rows.index_copy_(0, places, rows.index_select(0, sources))
