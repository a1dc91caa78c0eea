"""A small model drafts a token tree, level by level; or several small models draft a branch each.

Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference and
Verification", ASPLOS 2024, section 3. Node i of the tree has the KV slot i + 1 behind that of the newest
token, and the position of its depth. The children of the nodes of a level are the likeliest tokens after
each; a node attends to the context, its ancestors and itself:

    widths [2, 2]    newest -> 0 1            level 1: one decode row
                     0 -> 2 3, 1 -> 4 5       level 2: the nodes 0 and 1 with a mask

A level is computed with all levels before it, because the mask is between the rows of a batch. Levels of
one node each are decode steps.

Letters of array names: N sequences that draft, Q nodes of the levels so far, C nodes of one level, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.block_copy import CacheSet
from kernels.prefill_attention import DraftTree
from policies.speculation.proposers.specinfer_tree import SpecinferTree as Proposer
from policies.speculation.tree import TokenTree
from realengine.runner.batch import Batch, TreeRows
from realengine.speculation.context import DrafterContext, LoadedDraft
from realengine.speculation.drafter import Drafts, Passed, Start
from realengine.speculation.drafters.decode_steps import DraftPlaces
from realengine.speculation.drafters.draft_model import DraftModel, load_models
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
        self._widths = tuple(widths)
        device = model.cache.layers[0][0].device
        self._num_nodes = [tree.num_nodes_to(depth) for depth in range(tree.depth + 1)]
        self._depths_Q = torch.tensor(tree.depths, device=device)
        self._masks = [_mask(tree, num_nodes).to(device) for num_nodes in self._num_nodes]

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
        logits_NV = self._model.logits(self._model.first_step(passed, places), slice(num_seqs))
        nodes_NQ = logits_NV.topk(self._widths[0]).indices
        for level in range(1, num_levels):
            logits_NCV = self._level_logits(nodes_NQ, level, places)
            children = logits_NCV.topk(self._widths[level]).indices
            nodes_NQ = torch.cat([nodes_NQ, children.view(num_seqs, -1)], dim=1)
        return Drafts(nodes_NQ)

    def _level_logits(self, nodes_NQ: torch.Tensor, level: int, places: DraftPlaces) -> torch.Tensor:
        """Computes the logits [N, C, V] of a level of nodes, which are the last of those drafted so far."""
        num_seqs, num_nodes = nodes_NQ.shape
        num_last = num_nodes - self._num_nodes[level - 1]
        if num_nodes == level:
            return self._model.logits(places.decode(nodes_NQ[:, -1], level), slice(num_seqs))[:, None]
        hidden = self._model.hidden(self._batch(nodes_NQ, level, places))
        last = hidden.view(num_seqs, num_nodes, -1)[:, -num_last:]
        return self._model.head(last.flatten(0, 1)).view(num_seqs, num_last, -1)

    def _batch(self, nodes_NQ: torch.Tensor, level: int, places: DraftPlaces) -> Batch:
        """Returns the batch of the nodes of the first levels."""
        num_seqs, num_nodes = nodes_NQ.shape
        device, start = nodes_NQ.device, places.start
        positions_T = places.positions(self._depths_Q[:num_nodes]).flatten()
        tree = DraftTree(
            self._masks[level],
            torch.zeros(num_seqs, dtype=torch.int32, device=device),
            positions_T.int(),
        )
        return Batch(
            tokens_T=nodes_NQ.flatten(),
            positions_T=positions_T,
            slots_T=places.slots(torch.arange(1, num_nodes + 1, device=device)).flatten(),
            block_tables_BM=start.tables_NM,
            chunk_starts=torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_nodes,
            context_lens_B=places.context_lens(1 + num_nodes),
            sampled_rows_S=None,
            num_decodes=0,
            max_query_len=num_nodes,
            max_context_len=min(start.max_context_len + num_nodes, places.max_len),
            tree=TreeRows(tree, num_seqs, num_seqs * num_nodes),
        )


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


def _mask(tree: TokenTree, num_nodes: int) -> torch.Tensor:
    """Returns a mask [num_nodes^2] in which each node sees itself and its ancestors."""
    mask = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
    for node, parent in enumerate(tree.parents[:num_nodes]):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return mask.flatten()
