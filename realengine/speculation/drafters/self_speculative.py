"""The target drafts with some of its layers, on its own KV cache.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding", ACL
2024. A draft token's KV lies in the slots of its position in the layers that run, and the pass that verifies
the token writes all layers there. So there is no KV of the draft's own, and nothing to follow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.block_copy import CacheSet
from realengine.model.backend import Backend
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.runner.batch import Batch
from realengine.speculation.drafter import DrafterContext, Drafts, LoadedDraft, Passed, Start
from realengine.speculation.drafters.choices import choice_of
from realengine.speculation.drafters.decode_steps import DraftPlaces, drafted_chain
from realengine.speculation.settings import SpeculationSettings


def load(settings: SpeculationSettings, context: DrafterContext) -> LoadedDraft:
    """Chooses the layers that draft; nothing is loaded. Raises ValueError for layers that do not exist."""
    layers = kept_layers(settings.skipped_layers, context.architecture.num_layers)

    def build(cache: KvCache) -> SelfSpeculative:
        return SelfSpeculative(
            context.target, cache, context.backend, context.max_model_len, layers, is_drawn=settings.draws
        )

    return LoadedDraft(0, build, draws=settings.draws)


class SelfSpeculative:
    """Drafts chains with the layers of the target that are kept.

    layers: their numbers, ascending. decoder, cache: the target's. is_drawn: whether tokens are drawn from
    the draft's distribution, instead of the likeliest ones.
    """

    wants_states = False
    is_static = True
    taps: tuple[int, ...] = ()
    cache_sets: tuple[CacheSet, ...] = ()

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        backend: Backend,
        max_model_len: int,
        layers: Sequence[int],
        *,
        is_drawn: bool = False,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._backend = backend
        self._max_model_len = max_model_len
        self._layers = tuple(layers)
        self._is_drawn = is_drawn

    def follow(self, passed: Passed) -> None:
        """Does nothing: the target has written the KV."""

    def draft(self, passed: Passed, start: Start, num_levels: int) -> Drafts:
        """Drafts num_levels tokens for each sequence."""
        places = DraftPlaces.of(start, self._cache, self._max_model_len)
        choice = choice_of(self._backend, start.sampling, is_drawn=self._is_drawn)
        return drafted_chain(num_levels, places, self._logits, choice)

    def _logits(self, batch: Batch, rows: slice) -> torch.Tensor:
        states = self._decoder.states(batch, self._cache, layers=self._layers)
        return self._decoder.head(states.hidden_TH[rows])


def kept_layers(skipped: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Returns the layers that draft; skipped: those that do not, or None: every second of the middle half.

    Raises ValueError for layers that the target does not have.
    """
    if skipped is None:
        skipped = range(num_layers // 4 + 1, num_layers - num_layers // 4, 2)
    wrong = [layer for layer in skipped if not 0 <= layer < num_layers]
    if wrong:
        raise ValueError(
            f"skipped_layers={list(skipped)}: the target has no layer {wrong[0]}; choose from 0 to "
            f"{num_layers - 1}"
        )
    kept = tuple(layer for layer in range(num_layers) if layer not in skipped)
    if not kept:
        raise ValueError(f"skipped_layers={list(skipped)}: at least one of the target's layers must draft")
    return kept
