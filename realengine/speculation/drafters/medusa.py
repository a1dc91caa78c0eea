"""Heads on the target's last hidden state, each of which predicts the token at one of the next places.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024. A
head is a few residual blocks x + SiLU(W x + b) and a projection to the vocabulary. The draft is the likeliest
token of every head, or a tree: a node of depth d and rank r has the r-th likeliest token of head d.

Letters of array names: N sequences that draft, D heads, K draft tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.block_copy import CacheSet
from policies.speculation import TokenTree, num_places
from realengine.model.kv_cache import KvCache
from realengine.model.linear import head_logits
from realengine.speculation.checkpoints import load_heads
from realengine.speculation.drafter import DrafterContext, Drafts, LoadedDraft, Passed, Start
from realengine.speculation.settings import SpeculationSettings
from realengine.speculation.tree_rows import check_tree


class Head(NamedTuple):
    """The weights of a head: blocks of (weight [H, H], bias [H] or None), and the projection [V, H]."""

    blocks: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]
    projection: torch.Tensor

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Computes the logits [N, V] of the head's place."""
        for weight, bias in self.blocks:
            hidden_NH = hidden_NH + F.silu(F.linear(hidden_NH, weight, bias))
        return head_logits(hidden_NH, self.projection)


def load(settings: SpeculationSettings, context: DrafterContext) -> LoadedDraft:
    """Loads the heads. Raises ValueError if they do not fit the target or the draft."""
    places = num_places(settings.proposer)
    (source,) = settings.models
    heads = [Head(*weights) for weights in load_heads(source, context, places)]
    tree = settings.proposer.tree
    if tree is not None:
        check_tree(tree, "speculative_token_tree", context.architecture.vocab_size)

    def build(target_cache: KvCache) -> Medusa:
        return Medusa(heads[:places], tree)

    return LoadedDraft(0, build)


class Medusa:
    """Drafts with heads, which need neither KV nor a pass of their own."""

    wants_states = True
    is_static = True
    taps: tuple[int, ...] = ()
    cache_sets: tuple[CacheSet, ...] = ()

    def __init__(self, heads: Sequence[Head], tree: TokenTree | None) -> None:
        self._heads = tuple(heads)
        self._tree = tree

    def follow(self, passed: Passed) -> None:
        """Does nothing: the heads read the last hidden state only."""

    def draft(self, passed: Passed, start: Start, num_levels: int) -> Drafts:
        """Drafts num_levels tokens, or levels of the tree, for each sequence."""
        assert passed.states is not None
        hidden_NH = passed.states.hidden_TH[start.rows_N]
        logits = [head.logits(hidden_NH) for head in self._heads[:num_levels]]
        if self._tree is None:
            return Drafts(torch.stack([each.argmax(dim=-1) for each in logits], dim=1))
        nodes = range(self._tree.num_nodes_to(num_levels))
        depths, ranks = self._tree.depths, self._tree.ranks
        most = [
            1 + max(ranks[node] for node in nodes if depths[node] == depth + 1) for depth in range(num_levels)
        ]
        likeliest = [each.topk(num, dim=-1).indices for each, num in zip(logits, most, strict=True)]
        return Drafts(torch.stack([likeliest[depths[node] - 1][:, ranks[node]] for node in nodes], dim=1))
