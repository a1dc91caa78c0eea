"""Drafts with layers that read hidden states: one token after the other, or a token tree level by level.

A layer predicts the token at position p + 2 from the hidden state at p and the token at p + 1; its KV at
position p has the target's slot of p. After a pass of the target all its rows are computed, each with the
token that followed; the row before the newest token gives the first draft token. Every further step takes a
drafted token, and the layer's own output in place of the target's hidden state.

Letters of array names: T tokens, N sequences that draft, Q nodes of a tree, C nodes of one level, H hidden
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kernels.block_copy import CacheSet
from policies.speculation import TokenTree
from realengine.model.decoder import Decoder, States
from realengine.model.kv_cache import KvCache
from realengine.runner.batch import Batch
from realengine.runner.parallel import Group
from realengine.speculation.checkpoints import LayerWeights
from realengine.speculation.drafter import DrafterContext, Drafts, LoadedDraft, Passed, Start
from realengine.speculation.drafters.decode_steps import DraftPlaces, max_len_in, num_kv_blocks
from realengine.speculation.drafters.tree_levels import Level, TreeLevels
from realengine.speculation.settings import SpeculationSettings
from realengine.speculation.tree_rows import check_tree


class FeatureModel(Protocol):
    """A layer, or several in turn, that drafts."""

    cache: KvCache
    taps: tuple[int, ...]
    vocab_size: int
    """Of the draft."""

    def features_of(self, states: States) -> torch.Tensor:
        """Returns the features [T, H] that the first step reads, from the target's hidden states."""
        ...

    def step(
        self, tokens_T: torch.Tensor, features_TH: torch.Tensor, batch: Batch, number: int
    ) -> torch.Tensor:
        """Computes step `number` for tokens and the features before them; returns their features [T, H]."""
        ...

    def logits(self, features_NH: torch.Tensor, number: int) -> torch.Tensor:
        """Computes the logits [N, V of the draft] after features of step `number`."""
        ...

    def tokens(self, drafted: torch.Tensor) -> torch.Tensor:
        """Returns the target's ids of tokens of the draft's vocabulary."""
        ...


def decoder_of(weights: LayerWeights, context: DrafterContext) -> Decoder:
    """Returns a decoder of a draft's layers, whole on every rank, by default with the target's embedding."""
    tensors = {"embedding.weight": context.target.embedding, **weights.tensors}
    tensors.setdefault("norm.weight", torch.ones_like(tensors["embedding.weight"][0]))
    tensors.setdefault("head.weight", tensors["embedding.weight"])
    return Decoder(weights.architecture, tensors, context.backend, context.max_model_len, Group())


def loaded_layers(
    model_of: Callable[[LayerWeights, KvCache, DrafterContext], FeatureModel],
    weights: LayerWeights,
    settings: SpeculationSettings,
    context: DrafterContext,
) -> LoadedDraft:
    """Returns the drafter of layers with their own KV cache, which has the blocks of the target's."""
    architecture, block_size, kv_dtype = weights.architecture, context.block_size, context.kv_dtype

    def build(target: KvCache) -> LayerDrafter:
        cache = KvCache(architecture, num_kv_blocks(target), block_size, kv_dtype, context.device)
        model = model_of(weights, cache, context)
        return LayerDrafter(model, context.max_model_len, settings.proposer.tree)

    return LoadedDraft(KvCache.bytes_per_block(architecture, block_size, kv_dtype), build)


class LayerDrafter:
    """Drafts with a `FeatureModel`.

    tree: of the draft tokens; None: a chain. Raises ValueError for a tree that is too large.
    """

    wants_states = True
    is_static = True

    def __init__(self, model: FeatureModel, max_model_len: int, tree: TokenTree | None = None) -> None:
        self.taps = model.taps
        self._model = model
        self._max_model_len = max_model_len
        self._tree: TreeLevels | None = None
        if tree is not None:
            max_len = max_len_in(model.cache, max_model_len)
            check_tree(tree, "speculative_token_tree", model.vocab_size, max_len)
            # A layer's KV stands one place before the target's.
            self._tree = TreeLevels(tree, 0, model.cache.layers[0][0].device)
        self._features_TH = torch.empty(0)

    @property
    def cache_sets(self) -> tuple[CacheSet, ...]:
        """The tensors of the layers' KV cache."""
        return self._model.cache.cache_sets

    def follow(self, passed: Passed) -> None:
        """Computes the first step for all rows of a pass."""
        assert passed.states is not None
        features_TH = self._model.features_of(passed.states)
        self._features_TH = self._model.step(passed.following_T, features_TH, passed.batch, 0)

    def draft(self, passed: Passed, start: Start, num_levels: int) -> Drafts:
        """Drafts num_levels tokens, or levels of the tree, for each sequence."""
        places = DraftPlaces.of(start, self._model.cache, self._max_model_len)
        features_NH = self._features_TH[start.rows_N]
        if self._tree is not None:
            return Drafts(self._tree_nodes(self._tree, features_NH, places, num_levels))
        tokens, drafted = self._likeliest(features_NH, 0), []
        for step in range(1, num_levels + 1):
            drafted.append(tokens)
            if step < num_levels:
                batch = places.decode(tokens, step - 1)
                features_NH = self._model.step(tokens, features_NH, batch, step)
                tokens = self._likeliest(features_NH, step)
        return Drafts(torch.stack(drafted, dim=1))

    def _likeliest(self, features_NH: torch.Tensor, step: int) -> torch.Tensor:
        return self._model.tokens(self._model.logits(features_NH, step).argmax(dim=-1))

    def _tree_nodes(
        self, levels: TreeLevels, features_NH: torch.Tensor, places: DraftPlaces, num_levels: int
    ) -> torch.Tensor:
        """Returns the nodes [N, Q] of the first levels."""
        before_NCH, number = features_NH[:, None], 0

        def logits_after(batch: Batch, level: Level) -> torch.Tensor:
            nonlocal before_NCH, number
            number += 1
            inputs_NCH = before_NCH[:, level.parents_C]
            found = self._model.step(batch.tokens_T, inputs_NCH.flatten(0, 1), batch, number)
            before_NCH = found.view_as(inputs_NCH)
            return self._logits(before_NCH, number)

        first = self._logits(before_NCH, 0)
        return levels.drafted(num_levels, places, first, logits_after, self._model.tokens)

    def _logits(self, features_NCH: torch.Tensor, step: int) -> torch.Tensor:
        return self._model.logits(features_NCH.flatten(0, 1), step).view(*features_NCH.shape[:2], -1)
