"""Drafts a token tree level by level: a level is one batch, whose rows see their ancestors in the KV cache.

Node i of the tree has a KV slot of its own, i behind that of the first node, and the position of its depth. A
mask over the nodes so far says which of them a row sees:

    widths [2, 2]    newest -> 0 1            level 1: nodes 0 and 1
                     0 -> 2 3, 1 -> 4 5       level 2: nodes 2 to 5, a mask of 4 rows and 6 nodes

Letters of array names: N sequences that draft, Q nodes of the tree, C nodes of one level, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.prefill_attention import DraftTree
from policies.speculation import TokenTree
from realengine.runner.batch import Batch, TreeRows
from realengine.speculation.drafters.decode_steps import DraftPlaces
from realengine.speculation.tree_rows import sees


class Level(NamedTuple):
    """The nodes of one level of a tree, which are numbered one after the other."""

    nodes: range
    parents_C: torch.Tensor
    """Place of each node's parent among the nodes of the level before."""
    ranks_C: torch.Tensor
    num_ranks: int
    mask: torch.Tensor
    """Which nodes up to this level each node sees, flat [C x Q]."""
    is_chain: bool
    """Whether this level and all before it have one node."""


class TreeLevels:
    """The levels of a token tree.

    first_distance: how far the KV of the first node is behind that of the newest token.
    """

    def __init__(self, tree: TokenTree, first_distance: int, device: torch.device) -> None:
        self._first_distance = first_distance
        self._distances_Q = torch.tensor(tree.depths, device=device) - 1 + first_distance
        seen = sees(tree)[1:, 1:].to(device)
        self._levels: list[Level] = []
        first_before = -1
        for depth in range(1, tree.depth + 1):
            nodes = range(tree.num_nodes_to(depth - 1), tree.num_nodes_to(depth))
            parents = [tree.parents[node] - first_before for node in nodes]
            ranks = [tree.ranks[node] for node in nodes]
            self._levels.append(
                Level(
                    nodes,
                    torch.tensor(parents, device=device),
                    torch.tensor(ranks, device=device),
                    1 + max(ranks),
                    seen[nodes.start : nodes.stop, : nodes.stop].flatten(),
                    nodes.stop == depth,
                )
            )
            first_before = nodes.start

    def drafted(
        self,
        num_levels: int,
        places: DraftPlaces,
        logits_NCV: torch.Tensor,
        logits_after: Callable[[Batch, Level], torch.Tensor],
        tokens_of: Callable[[torch.Tensor], torch.Tensor] = lambda drafted: drafted,
    ) -> torch.Tensor:
        """Returns the nodes [N, Q] of the first levels.

        logits_NCV: those after the newest token, with C = 1. logits_after: computes the batch of a level, and
        the logits [N, C, V] after its nodes. tokens_of: the target's ids of tokens of the draft's vocabulary.
        """
        tokens_NC = tokens_of(_children(logits_NCV, self._levels[0]))
        nodes = [tokens_NC]
        for level, following in zip(self._levels, self._levels[1:num_levels], strict=False):
            logits_NCV = logits_after(self._batch(tokens_NC, level, places), level)
            tokens_NC = tokens_of(_children(logits_NCV, following))
            nodes.append(tokens_NC)
        return torch.cat(nodes, dim=1)

    def _batch(self, tokens_NC: torch.Tensor, level: Level, places: DraftPlaces) -> Batch:
        """Returns the batch of a level: decode rows as long as there is one node per level."""
        first, end = level.nodes.start, level.nodes.stop
        if level.is_chain:
            return places.decode(tokens_NC[:, 0], first + self._first_distance)
        num_seqs, num_rows = tokens_NC.shape
        device, start = tokens_NC.device, places.start
        positions_NQ = places.positions(self._distances_Q[:end])
        num_tokens = end + self._first_distance
        tree = DraftTree(
            level.mask,
            torch.zeros(num_seqs, dtype=torch.int32, device=device),
            positions_NQ.flatten().int(),
            num_before=first,
        )
        return Batch(
            tokens_T=tokens_NC.flatten(),
            positions_T=positions_NQ[:, first:].flatten(),
            slots_T=places.slots(torch.arange(first, end, device=device) + self._first_distance).flatten(),
            block_tables_BM=start.tables_NM,
            chunk_starts=torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_rows,
            context_lens_B=places.context_lens(num_tokens),
            sampled_rows_S=None,
            num_decodes=0,
            max_query_len=num_rows,
            max_context_len=min(start.max_context_len + num_tokens, places.max_len),
            tree=TreeRows(tree, num_seqs, num_seqs * num_rows),
        )


def _children(logits_NCV: torch.Tensor, level: Level) -> torch.Tensor:
    """Returns the tokens [N, nodes of a level]: each of its rank after its parent."""
    likeliest = logits_NCV.topk(level.num_ranks, dim=-1).indices
    return likeliest[:, level.parents_C, level.ranks_C]
