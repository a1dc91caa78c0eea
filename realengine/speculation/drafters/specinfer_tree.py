"""A small model drafts a token tree, level by level; or several small models draft a branch each.

Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference and
Verification", ASPLOS 2024, section 3. The children of the nodes of a level are the likeliest tokens after
each (`tree_levels.py`). The newest token is a decode row of the first step.

Letters of array names: N sequences that draft, C nodes of one level.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.block_copy import CacheSet
from policies.speculation import TokenTree
from policies.speculation.proposers import SpecinferTree as Proposer
from realengine.runner.batch import Batch
from realengine.speculation.drafter import DrafterContext, Drafts, LoadedDraft, Passed, Start
from realengine.speculation.drafters.draft_model import DraftModel, load_models
from realengine.speculation.drafters.tree_levels import Level, TreeLevels
from realengine.speculation.settings import SpeculationSettings
from realengine.speculation.tree_rows import check_tree


def load(settings: SpeculationSettings, context: DrafterContext) -> LoadedDraft:
    """Loads the weights of one or several draft models. Raises ValueError if they do not fit."""
    assert isinstance(settings.proposer, Proposer)
    widths, num_models = settings.proposer.widths, len(settings.models)
    if num_models == 1:
        return load_models(
            settings.models, context, lambda models: SpecinferTree(models[0], widths), verifies_others=True
        )
    if widths != (num_models, *[1] * (len(widths) - 1)):
        raise ValueError(
            f"widths={list(widths)}: {num_models} models draft one branch each, so widths must be "
            f"[{num_models}, 1, ...] with a 1 for each further token of a branch"
        )
    return load_models(settings.models, context, SeveralDrafts, verifies_others=True)


class SpecinferTree:
    """Drafts a tree with one model, which must compute all accepted tokens again (`verifies_others`).

    widths: children of each node, by level. Raises ValueError if the tree is too large for the context or the
    vocabulary.
    """

    wants_states = False
    is_static = True
    taps: tuple[int, ...] = ()

    def __init__(self, model: DraftModel, widths: Sequence[int]) -> None:
        tree = TokenTree.of_widths(list(widths))
        check_tree(tree, f"widths={list(widths)}", model.vocab_size, model.max_len)
        self._model = model
        self._levels = TreeLevels(tree, 1, model.cache.layers[0][0].device)

    @property
    def cache_sets(self) -> tuple[CacheSet, ...]:
        """The tensors of the model's KV cache."""
        return self._model.cache_sets

    def follow(self, passed: Passed) -> None:
        """Computes the KV of a pass in the order of its positions."""
        self._model.follow(passed)

    def draft(self, passed: Passed, start: Start, num_levels: int) -> Drafts:
        """Drafts the first num_levels levels of the tree for each sequence."""
        places = self._model.places(start)
        num_seqs = len(start.newest_N)

        def logits_after(batch: Batch, level: Level) -> torch.Tensor:
            logits_TV = self._model.logits(batch, slice(len(batch.tokens_T)))
            return logits_TV.view(num_seqs, len(level.nodes), -1)

        first = self._model.logits(self._model.first_step(passed, places), slice(num_seqs))
        return Drafts(self._levels.drafted(num_levels, places, first[:, None], logits_after))


class SeveralDrafts:
    """Drafts a tree of which each branch is the chain of one model (`verifies_others` of each).

    The tree has as many nodes in every level as there are models, and forks at the newest token only.
    """

    wants_states = False
    is_static = True
    taps: tuple[int, ...] = ()

    def __init__(self, models: Sequence[DraftModel]) -> None:
        self._models = tuple(models)

    @property
    def cache_sets(self) -> tuple[CacheSet, ...]:
        """The tensors of the models' KV caches."""
        return tuple(sets for model in self._models for sets in model.cache_sets)

    def follow(self, passed: Passed) -> None:
        """Computes the KV of a pass with each model."""
        for model in self._models:
            model.follow(passed)

    def draft(self, passed: Passed, start: Start, num_levels: int) -> Drafts:
        """Drafts num_levels nodes of each branch for each sequence."""
        chains = [model.draft(passed, start, num_levels).tokens_NK for model in self._models]
        return Drafts(torch.stack(chains, dim=2).flatten(1))
