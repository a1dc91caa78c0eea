"""The token tree of a pass as tensors: which rows see each other, and which row continues another one."""

from __future__ import annotations

import torch

from kernels.prefill_attention import DraftTree
from policies.speculation import TokenTree


def sees(tree: TokenTree) -> torch.Tensor:
    """Returns which rows see which: bool [rows, rows], the root as row 0 and node i as row i + 1."""
    found = torch.eye(tree.num_nodes + 1, dtype=torch.bool)
    for node, parent in enumerate(tree.parents):
        found[node + 1] |= found[parent + 1]
    return found


def check_tree(tree: TokenTree, setting: str, vocab_size: int, max_len: int | None = None) -> None:
    """Raises ValueError for a tree with more children of a node than tokens, or without room for its KV.

    setting: names the tree. vocab_size: tokens of the draft. max_len: tokens of the longest sequence of which
    the KV cache holds the nodes; None: they have no KV.
    """
    num_nodes, num_children = tree.num_nodes, 1 + max(tree.ranks)
    if num_children > vocab_size:
        raise ValueError(
            f"{setting}: a node has {num_children} children: must be at most vocab_size={vocab_size}, that "
            "of the draft"
        )
    if max_len is not None and num_nodes >= max_len:
        raise ValueError(
            f"{setting}: {num_nodes} nodes need KV of more than {num_nodes} tokens, it holds {max_len} of a "
            "sequence; draft fewer, or raise max_model_len or num_kv_blocks"
        )


class TreeShape:
    """A token tree with its root, the newest token, as row 0; node i of the tree is row i + 1."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        parents = [-1, *(parent + 1 for parent in tree.parents)]
        num_rows = len(parents)
        ancestors = torch.zeros(num_rows, tree.depth + 1, dtype=torch.int64)
        seen = sees(tree)
        for row in range(1, num_rows):
            depth = tree.depths[row - 1]
            ancestors[row, :depth] = ancestors[parents[row], :depth]
            ancestors[row, depth] = row
        self.depths = torch.tensor([0, *tree.depths], device=device)
        """Depth of each row; 0: the root."""
        self.parents = torch.tensor(parents, device=device)
        """Row that each row continues; -1: the root's."""
        self.ancestors = ancestors.to(device)
        """Row at each depth on the way to a row [rows, depths]; valid up to the row's own depth."""
        sizes = [1 + tree.num_nodes_to(depth) for depth in range(tree.depth + 1)]
        starts = torch.zeros(num_rows + 1, dtype=torch.int32)
        starts[sizes[1:]] = (
            torch.tensor([size * size for size in sizes[:-1]], dtype=torch.int32).cumsum(0).int()
        )
        self._mask = torch.cat([seen[:size, :size].flatten() for size in sizes]).to(device)
        self._starts = starts.to(device)

    def draft_tree(self, num_rows_B: torch.Tensor, positions_T: torch.Tensor) -> DraftTree:
        """Returns the mask of passes with the first rows of the tree, whole levels each.

        num_rows_B: rows of each pass, int64. positions_T: positions of the rows of all passes.
        """
        return DraftTree(self._mask, self._starts[num_rows_B], positions_T.int())
